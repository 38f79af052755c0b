"""The settings of vLLM (current and older versions) and TensorRT-LLM that Headrace does not have, by reason.

Data only, a file for each subject; `other_settings.py` applies it. A test compares the names with those of `vllm serve`
of the version that `doctor/readers/vllm_flags.py` names.
"""

from __future__ import annotations

from headrace.flag_groups import FlagGroup, OtherFlag
from headrace.other_flags.engine_flags import ENGINE
from headrace.other_flags.model_flags import MODEL
from headrace.other_flags.parallel_flags import PARALLEL
from headrace.other_flags.sampling_flags import SAMPLING
from headrace.other_flags.server_flags import SERVER
from headrace.other_flags.tensorrt_flags import TENSORRT

_SEVERAL_ENGINES = "only 'headrace serve' and AsyncEngine have it; 'headrace run' runs several engines with --workers"

GROUPS: tuple[FlagGroup, ...] = (*ENGINE, *MODEL, *PARALLEL, *SAMPLING, *SERVER, *TENSORRT)

OTHER_FLAGS: dict[str, OtherFlag] = {flag: other for group in GROUPS for flag, other in group.flags().items()}

# Settings of vLLM that only the server has.
SERVER_GROUPS: tuple[FlagGroup, ...] = (
    FlagGroup("refused", _SEVERAL_ENGINES, values="data-parallel-size=1 -dp=1"),
    FlagGroup("ignored", "only 'headrace serve' gives the model another name", lists="served-model-name"),
    FlagGroup("ignored", "only 'headrace serve' limits the log-probabilities of a request", values="max-logprobs"),
)
OF_THE_SERVER: dict[str, OtherFlag] = {flag: other for group in SERVER_GROUPS for flag, other in group.flags().items()}
