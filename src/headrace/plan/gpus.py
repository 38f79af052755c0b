"""The devices that a plan can name: rates, memory, links and a typical price, each with its public source.

Rates are dense (without structured sparsity), in TFLOP/s, from the vendors' data sheets; memory is what CUDA reports as
total, which is less than the name on the box. A price is an assumption, not an offer: `--gpu-price` replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from headrace.errors import ConfigError, nearest
from headrace.hardware.host_link import HostLink, pcie

GIB = 2**30
MEASURED_GPU = "H200"  # the constants of `constants.py` were fitted on records of this GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device. Bandwidths are bytes/s, rates are FLOP/s, prices are US dollars per hour."""

    name: str
    title: str
    memory_bytes: int
    bandwidth: float
    bf16_rate: float  # a CPU: float32
    fp8_rate: float | None  # None: no FP8 tensor cores
    int8_rate: float | None
    link: str  # between the GPUs of a node: "NVLink", "PCIe", "Infinity Fabric" or "none"
    link_bandwidth: float  # per GPU and direction
    price: float | None
    pcie_generation: int = 5  # of the link to the host, with 16 lanes
    capability: tuple[int, int] = (9, 0)  # CUDA compute capability
    gpus_per_node: int = 8
    aliases: tuple[str, ...] = ()
    is_cpu: bool = False
    runs_headrace: bool = True  # Headrace runs on CUDA GPUs and CPUs
    is_price_given: bool = False  # by the user, so it is no assumption

    @property
    def host_link(self) -> HostLink:
        return pcie(self.pcie_generation)

    @property
    def is_measured(self) -> bool:
        """Whether records of this device exist, on which predictions were checked."""
        return self.name == MEASURED_GPU

    def with_price(self, price: float | None) -> Gpu:
        return self if price is None else replace(self, price=price, is_price_given=True)


def _nvidia(
    name: str, title: str, gib: float, tb_s: float, rates: tuple[float, float | None, float | None], **more: object
) -> Gpu:
    bf16, fp8, int8 = rates
    return Gpu(
        name=name,
        title=title,
        memory_bytes=int(gib * GIB),
        bandwidth=tb_s * 1e12,
        bf16_rate=bf16 * 1e12,
        fp8_rate=None if fp8 is None else fp8 * 1e12,
        int8_rate=None if int8 is None else int8 * 1e12,
        **more,  # type: ignore[arg-type]
    )


# Prices: roughly what public clouds ask per GPU-hour on demand; they move, and the largest clouds ask more.
GPUS: tuple[Gpu, ...] = (
    # NVIDIA A100 Tensor Core GPU data sheet (2021): 312 TFLOP/s bf16, 624 TOP/s int8, 1,555 GB/s (40 GB),
    # 2,039 GB/s (80 GB SXM), NVLink 600 GB/s in both directions together.
    _nvidia("A100-40GB", "NVIDIA A100 40GB SXM", 39.5, 1.555, (312, None, 624), link="NVLink", link_bandwidth=300e9,
            price=1.30, pcie_generation=4, capability=(8, 0), aliases=("a100-40", "a100-sxm4-40gb")),
    _nvidia("A100", "NVIDIA A100 80GB SXM", 79.2, 2.039, (312, None, 624), link="NVLink", link_bandwidth=300e9,
            price=1.80, pcie_generation=4, capability=(8, 0), aliases=("a100-80", "a100-80gb", "a100-sxm4-80gb")),
    # NVIDIA L4 data sheet: 242 TFLOP/s bf16 and 485 fp8 with sparsity (half of it dense), 300 GB/s, PCIe 4.0 x16.
    _nvidia("L4", "NVIDIA L4", 22.0, 0.300, (121, 242.5, 242.5), link="PCIe", link_bandwidth=32e9, price=0.70,
            pcie_generation=4, capability=(8, 9)),
    # NVIDIA L40S data sheet: 362 TFLOP/s bf16 and 733 fp8 dense, 864 GB/s, PCIe 4.0 x16, no NVLink.
    _nvidia("L40S", "NVIDIA L40S", 44.4, 0.864, (362, 733, 733), link="PCIe", link_bandwidth=32e9, price=1.10,
            pcie_generation=4, capability=(8, 9)),
    # NVIDIA Ada GPU architecture paper, RTX 4090: 165.2 TFLOP/s bf16 and 330.3 fp8 with float32 accumulation,
    # 660.6 TOP/s int8, 1,008 GB/s; PCIe 4.0 x16, no NVLink.
    _nvidia("RTX4090", "NVIDIA GeForce RTX 4090", 23.6, 1.008, (165.2, 330.3, 660.6), link="PCIe",
            link_bandwidth=32e9, price=0.45, pcie_generation=4, capability=(8, 9), gpus_per_node=4,
            aliases=("4090", "rtx-4090")),
    # NVIDIA RTX Blackwell architecture paper, RTX 5090: 209.5 TFLOP/s bf16 and 419 fp8 with float32 accumulation,
    # 838 TOP/s int8, 1,792 GB/s; PCIe 5.0 x16, no NVLink.
    _nvidia("RTX5090", "NVIDIA GeForce RTX 5090", 31.4, 1.792, (209.5, 419, 838), link="PCIe", link_bandwidth=64e9,
            price=0.70, capability=(12, 0), gpus_per_node=4, aliases=("5090", "rtx-5090")),
    # NVIDIA H100 data sheet: SXM 1,979 TFLOP/s bf16 and 3,958 fp8 with sparsity (half of it dense), 3.35 TB/s,
    # NVLink 900 GB/s; PCIe card 1,513 and 3,026 with sparsity, 2.0 TB/s, PCIe 5.0 x16.
    _nvidia("H100", "NVIDIA H100 SXM 80GB", 79.2, 3.35, (989.5, 1979, 1979), link="NVLink", link_bandwidth=450e9,
            price=3.00, aliases=("h100-sxm", "h100-80gb", "h100-sxm5")),
    _nvidia("H100-PCIe", "NVIDIA H100 PCIe 80GB", 79.2, 2.0, (756.5, 1513, 1513), link="PCIe", link_bandwidth=64e9,
            price=2.40),
    # NVIDIA H200 data sheet: the rates of the H100 SXM, 141 GB, 4.8 TB/s. CUDA's total is from records of this project.
    _nvidia("H200", "NVIDIA H200 SXM 141GB", 139.8, 4.8, (989.5, 1979, 1979), link="NVLink", link_bandwidth=450e9,
            price=3.60, aliases=("h200-sxm", "nvidia-h200")),
    # NVIDIA DGX B200 data sheet, per GPU: 2.25 PFLOP/s bf16 and 4.5 fp8 dense, 180 GB, 8 TB/s, NVLink 1.8 TB/s.
    _nvidia("B200", "NVIDIA B200 SXM 180GB", 178.4, 8.0, (2250, 4500, 4500), link="NVLink", link_bandwidth=900e9,
            price=5.50, capability=(10, 0)),
    # AMD Instinct MI300X data sheet: 1,307.4 TFLOP/s bf16 and 2,614.9 fp8 dense, 192 GB, 5.3 TB/s, seven Infinity
    # Fabric links of 64 GB/s per direction.
    _nvidia("MI300X", "AMD Instinct MI300X", 191.7, 5.3, (1307.4, 2614.9, 2614.9), link="Infinity Fabric",
            link_bandwidth=448e9, price=2.50, runs_headrace=False),
)  # fmt: skip


PACKED_RATIO = 1.4  # rate of a CPU's GEMMs with packed weights over its float32 ones (docs/experiments.md)
INT8_RATIO = 3.0  # rate of a CPU's INT8 GEMMs over its float32 ones, two cores with VNNI (docs/experiments.md)


def cpu(*, bandwidth: float, flops: float, memory_bytes: int, title: str = "CPU", price: float | None = None) -> Gpu:
    """A CPU with this memory bandwidth (bytes/s) and float32 rate (FLOP/s); `--probe` and `hostprobe` measure them."""
    return Gpu(
        name="CPU",
        title=title,
        memory_bytes=memory_bytes,
        bandwidth=bandwidth,
        bf16_rate=flops,
        fp8_rate=None,
        int8_rate=INT8_RATIO * flops,
        link="none",
        link_bandwidth=0.0,
        price=price,
        capability=(0, 0),
        gpus_per_node=1,
        is_cpu=True,
        is_price_given=price is not None,
    )


def find_gpu(name: str) -> Gpu:
    """Find a GPU by its name or an alias; case and separators do not matter."""
    wanted = _plain(name)
    for gpu in GPUS:
        if wanted in (_plain(known) for known in (gpu.name, gpu.title, *gpu.aliases)):
            return gpu
    names = [gpu.name for gpu in GPUS]
    raise ConfigError(f"unknown GPU {name!r}{nearest(name.upper(), names)} (known: {', '.join(names)}, cpu)")


def match_gpu(title: str) -> Gpu | None:
    """The GPU that a driver's name for it means, such as "NVIDIA A100-SXM4-40GB"; None: it is not in the table."""
    found = [
        (len(_plain(known)), gpu)
        for gpu in GPUS
        for known in (gpu.name, gpu.title, *gpu.aliases)
        if _plain(known) in _plain(title)
    ]
    return max(found, key=lambda match: match[0])[1] if found else None


def find_gpus(names: Iterable[str]) -> list[Gpu]:
    return [find_gpu(name) for name in names]


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
