"""Chooses how many CPU threads an engine has, and to which CPUs they are pinned. Each choice has its reason.

                    threads                                     pinned to
    CPU engine      the physical cores of one socket            one logical CPU of each of these cores
    GPU engine      the cores of the GPU's NUMA node            the CPUs of that node

Nothing is pinned where it would change nothing (one NUMA node without SMT siblings), where a quota of CPU time lets
other containers use the same CPUs, and where the system does not tell its topology.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.hardware import CpuTopology, MachineFacts
from headrace.hardware.affinity import CAN_PIN
from headrace.hardware.cpu_list import cpu_list, parse_cpu_list
from headrace.hardware.topology import Core

NOT_PINNED = "none"
MAX_NODE_SHARE = 0.8  # of a socket's memory, for the weights of an engine that runs on this socket alone
MAX_THREADS_PER_CORE = 8  # more than this is refused


@dataclass(frozen=True, slots=True)
class Threads:
    num_threads: int
    reason: str
    cpu_affinity: str  # a list of CPUs, or "none"
    affinity_reason: str


@dataclass(frozen=True, slots=True)
class _Pin:
    affinity: str
    reason: str


def choose_threads(config: EngineConfig, facts: MachineFacts, *, on_gpu: bool, weight_bytes: int) -> Threads:
    topology = facts.topology
    if topology is None:
        return _of_unknown_machine(config, facts)
    if config.cpu_affinity not in ("auto", NOT_PINNED):
        return _as_set(config, topology)
    if on_gpu:
        return _for_gpu(config, facts, topology)
    cores, why = _local_cores(topology, weight_bytes)
    num_threads, reason = len(cores), why
    quota = topology.limits.cpu_quota
    if quota is not None and quota < len(cores):
        num_threads = max(1, int(quota))
        reason = f"the container's quota of {quota:g} CPUs: more threads would be stopped in the middle of a step"
    if config.num_threads is not None:
        num_threads, reason = config.num_threads, "as set"
    pin = _left(config) or _pin_to_cores(topology, cores, num_threads)
    return Threads(num_threads, reason, pin.affinity, pin.reason)


def cpus_of(cpu_affinity: str) -> frozenset[int]:
    """Empty if nothing is pinned."""
    return parse_cpu_list(cpu_affinity)


def _of_unknown_machine(config: EngineConfig, facts: MachineFacts) -> Threads:
    given = config.num_threads
    reason = "all cores that this process may use" if given is None else "as set"
    return Threads(given or facts.num_cores, reason, NOT_PINNED, "the topology of the machine is not known")


def _left(config: EngineConfig) -> _Pin | None:
    if config.cpu_affinity == NOT_PINNED:
        return _Pin(NOT_PINNED, "as set: threads run where the system puts them")
    if not CAN_PIN:
        return _Pin(NOT_PINNED, "this system cannot pin threads")
    return None


def _as_set(config: EngineConfig, topology: CpuTopology) -> Threads:
    cpus = cpus_of(config.cpu_affinity)
    if not cpus <= topology.cpus:
        raise ConfigError(
            f"cpu_affinity={config.cpu_affinity!r} has CPUs that this process may not use: it may use "
            f"{cpu_list(topology.cpus)}"
        )
    num_cores = sum(1 for core in topology.cores if cpus.intersection(core.cpus))
    given = config.num_threads
    reason = "physical cores of cpu_affinity" if given is None else "as set"
    return Threads(given or num_cores, reason, cpu_list(cpus), "as set")


def _for_gpu(config: EngineConfig, facts: MachineFacts, topology: CpuTopology) -> Threads:
    place = None if facts.gpu is None else facts.gpu.place
    near = frozenset() if place is None else place.local_cpus & topology.cpus
    pin = _left(config)
    if pin is None and (place is None or not place.local_cpus):
        pin = _Pin(NOT_PINNED, "the system does not tell which CPUs are near the GPU")
    elif pin is None and place is not None and not near:
        own, others = cpu_list(topology.cpus), cpu_list(place.local_cpus)
        pin = _Pin(NOT_PINNED, f"this process may use CPUs {own}, and those near the GPU are {others}")
    elif pin is None and near == topology.cpus:
        pin = _Pin(NOT_PINNED, "all CPUs that this process may use are near the GPU")
    elif pin is None and place is not None:
        pin = _Pin(cpu_list(near), f"host threads of the engine run on {place.name}, where the GPU is")
    assert pin is not None
    is_pinned = pin.affinity != NOT_PINNED
    num_threads = min(len(near), facts.num_cores) if is_pinned else facts.num_cores
    reason = "CPUs near the GPU" if is_pinned else "all cores that this process may use"
    if config.num_threads is not None:
        num_threads, reason = config.num_threads, "as set"
    return Threads(num_threads, reason, pin.affinity, pin.reason)


def _local_cores(topology: CpuTopology, weight_bytes: int) -> tuple[tuple[Core, ...], str]:
    """The cores of one socket if there are several: memory of another socket is read at a fraction of the rate. The
    one with the most free memory: an engine that started before has its weights on the other."""
    every = topology.cores
    siblings = "; their SMT siblings would share their arithmetic units" if len(topology.cpus) > len(every) else ""
    if len(topology.sockets) < 2:
        return every, f"all physical cores that this process may use{siblings}"

    def rank(socket: int) -> tuple[int, int]:
        cores = topology.cores_of(socket)
        return len(cores), sum(node.free_bytes or 0 for node in topology.nodes_of(cores))

    sockets = sorted(topology.sockets, key=rank, reverse=True)
    cores = topology.cores_of(sockets[0])
    memory = sum(node.total_bytes or 0 for node in topology.nodes_of(cores))
    if memory and weight_bytes > MAX_NODE_SHARE * memory:
        return every, f"all physical cores: the weights need the memory of all {len(sockets)} sockets{siblings}"
    reason = (
        f"physical cores of socket {sockets[0]}, near its memory; workers of a job, or one server per socket, use the "
        f"other {len(every) - len(cores)}"
    )
    return cores, reason


def _pin_to_cores(topology: CpuTopology, cores: tuple[Core, ...], num_threads: int) -> _Pin:
    if not topology.is_known:
        return _Pin(NOT_PINNED, "the system does not tell its topology")
    if topology.limits.cpu_quota is not None:
        return _Pin(NOT_PINNED, "the container has a quota of CPU time: others may use the same CPUs")
    if num_threads < len(cores):
        return _Pin(NOT_PINNED, "num_threads leaves cores to others, whose threads this engine cannot see")
    chosen = cores if num_threads == len(cores) else topology.cores
    cpus = frozenset(core.cpus[0] for core in chosen)
    if num_threads > len(chosen):
        return _Pin(NOT_PINNED, f"there are more threads than the {len(chosen)} physical cores")
    if cpus == topology.cpus:
        return _Pin(NOT_PINNED, "one socket without SMT siblings: pinning would change nothing")
    return _Pin(cpu_list(cpus), "model threads run on one CPU of each physical core; all others may run anywhere")
