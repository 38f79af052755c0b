"""Runs plans on a GPU. The GPU's stream is the order of execution; there is no thread of its own.

    plan ─▶ Upload (one pinned copy: slot entries, table writes, step description)
         ├▶ decode step            2 CUDA graph replays: model; sampling and appending. Few sequences: 1 for all of it
         ├▶ step with drafts       1 replay of a decode graph with several rows of a slot, then sampling and acceptance
         ├▶ small prefill step     1 CUDA graph replay for the model, then head and sampling eagerly
         └▶ any other step         eager: decode | prefill continuations | fresh prefills
         ─▶ Ticket (pinned results, an event) ─▶ collect, one or two steps later

    gpu_runner       submit and collect
    gpu_slots        tokens, lengths and block tables by slot, on the GPU
    graph_sizes      the sizes that CUDA graphs are captured for, and which graph runs a step
    decode_graphs    capture and choice of decode graphs; decode_inputs: their input buffers
    capture          how a step becomes a graph, with the collectives of a divided model inside
    step_sampling    sampling and appending, plain or with all features
    draft_steps      steps that verify drafts; draft_graphs: drafts of a model
    ticket           a submitted step and its result; the pinned memory of results in flight
    prefill_graphs   capture of graphs for small steps with prompts
    step_layouts     layout of eager steps; tiles, context_gather and prefix_groups prepare parts of it
    context_splits   how decode attention splits long contexts over programs
    prefix_sharing   whether decode reads a shared prefix once for all sequences of a group
    gemm_warmup, memory   kernels and memory taken at start, so that no step waits for them
    gpu_host_blocks  pinned memory of the host tier, and copies from and to it beside the steps
    upload           pinned buffers from host to GPU; pinned_memory: how such memory is allocated
    copy_stream      copies of streamed weights from host memory, beside the computation
    peer_sums        small sums over ranks that share memory
    encoder_runner   steps of an encoder
    meta_gpu         a stand-in for the GPU without memory, on which a start shows which kernels it needs

- The last slot and the last block are padding: graphs are filled up with them.
- Steps with prompts compute the last layer only for the tokens that are sampled after.
- With FlashAttention-3, fresh prefills read the step's own keys and values, and prefill continuations read contexts
  that are gathered out of their blocks where that is faster; otherwise a Triton kernel reads the paged KV cache.
- Decode slots are ordered by context, the longest first, so that no program is left running alone.
- Values that change from step to step are not compiled into kernels.
"""
