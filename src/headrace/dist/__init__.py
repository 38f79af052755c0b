"""Several processes that compute one model together.

    mesh.py          which process this is: its rank, and the number of ranks
    rendezvous.py    where ranks find each other
    collectives.py   what the ranks of a group compute together: sums, gathered tensors; over Gloo or NCCL
    peer_memory.py   GPU memory that all ranks of a machine can write to, for small sums in one kernel
    device_stage_link.py   hidden states between the stages of a pipeline on GPUs

A rank is a process with a part of the model. There is no global group and no global rank: what needs one gets it as an
argument, so two engines in one process do not know of each other. How a model is divided is in `models/shards.py`; the
processes are started and watched by `engine/ranks`.
"""
