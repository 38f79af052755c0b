"""The device side of a step: a runner executes plans and returns results (`steps.Runner`).

    cpu_runner        runs a model on a CPU, on a thread of its own
    gpu/              runs a model on a GPU, with CUDA graphs
    fake              needs no model and no torch: for tests, and to measure the host's cost
    host_blocks       memory of the host tier, and copies from and to it (CPU); gpu/gpu_host_blocks is its counterpart
    slots             the device's state by slot (CPU); gpu/gpu_slots is its counterpart
    step_outputs      what the model computes in a step; prompt_logprobs and readouts are parts of it
    results           from device tensors to numpy arrays
    shape             the sizes that a runner is built for

Invariants:
- The device keeps its own state. Tokens, lengths, block tables and sampling parameters are columns indexed by slot,
  written when a sequence enters. A step reads its inputs there and writes the sampled token back, so the next step can
  be submitted before the host has seen this one.
- A slot that ends on the device computes nothing in steps that were already planned.
- Anything that touches device tensors happens here; `sched` and `kv` only know block and slot numbers.
"""
