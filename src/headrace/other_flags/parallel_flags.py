"""Several GPUs and machines. Data of `other_flags`."""

from __future__ import annotations

from headrace.flag_groups import FlagGroup

_ONE_LAYOUT = (
    "a model is divided over processes by --tensor-parallel-size and --pipeline-parallel-size, on --nnodes machines; "
    "--data-parallel-size starts several engines behind one address, and a job several workers"
)

PARALLEL: tuple[FlagGroup, ...] = (
    FlagGroup(
        "refused",
        _ONE_LAYOUT,
        values="data-parallel-size-local=1 -dpl=1 data-parallel-rank=0 -dpn=0 "
        "data-parallel-start-rank=0 -dpr=0 decode-context-parallel-size=1 -dcp=1 prefill-context-parallel-size=1 "
        "-pcp=1 elastic-ep-max-dp-size cp-size=1 "
        "context-parallel-size=1 moe-tensor-parallel-size=1|-1 moe-expert-parallel-size=1|-1 "
        "moe-cluster-parallel-size=1|-1",
        switches="enable-eplb enable-dbo enable-elastic-ep "
        "data-parallel-external-lb -dpe data-parallel-hybrid-lb -dph data-parallel-multi-port-external-lb -dpm "
        "enable-scale-out enable-attention-dp",
    ),
    FlagGroup(
        "ignored",
        "it belongs to a layout that is not supported, and changes nothing alone",
        values="data-parallel-backend=mp -dpb=mp data-parallel-address -dpa data-parallel-rpc-port -dpp "
        "data-parallel-supervisor-port dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s "
        "dp-supervisor-probe-timeout-s dp-sync-interval distributed-timeout-seconds "
        "cpu-distributed-timeout-seconds all2all-backend dbo-decode-token-threshold dbo-prefill-token-threshold "
        "ubatch-size=0 dcp-comm-backend dcp-kv-cache-interleave-size cp-kv-cache-interleave-size eplb-config "
        "num-redundant-experts=0 eplb-window-size eplb-step-interval expert-placement-strategy=linear",
        switches="dcp-q-replicate disable-nccl-for-dp-synchronization enable-ep-weight-filter eplb-log-balancedness",
    ),
    FlagGroup(
        "ignored",
        "the engine runs in its own process, without Ray",
        switches="engine-use-ray worker-use-ray ray-workers-use-nsight disable-frontend-multiprocessing",
    ),
    FlagGroup("refused", "set CUDA_VISIBLE_DEVICES", values="device-ids"),
    FlagGroup(
        "ignored", "the engine takes the first visible GPU; a job takes one worker per GPU", values="gpus-per-node=1"
    ),
    FlagGroup(
        "ignored",
        "threads of the engine are always pinned near their GPU; --cpu-affinity chooses others",
        switches="numa-bind",
        lists="numa-bind-cpus numa-bind-nodes",
    ),
    FlagGroup("refused", "one process serves HTTP", values="api-server-count=1 -asc=1"),
    FlagGroup(
        "ignored",
        "an engine that fails is always restarted; --max-engine-restarts is the limit",
        values="fault-tolerance-config",
        switches="enable-fault-tolerance",
    ),
)
