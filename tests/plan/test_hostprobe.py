"""The rates of this machine, measured without torch."""

from __future__ import annotations

from headrace.plan.hostprobe import measure_host, this_cpu


def test_rates_are_measured_and_gemms_count_every_core() -> None:
    rates = measure_host(2, seconds_each=0.005)
    assert rates.bandwidth > 1e8 and rates.flops > 1e8


def test_given_rates_are_not_measured_again() -> None:
    device = this_cpu(bandwidth=5e9, flops=7e9)
    assert (device.bandwidth, device.bf16_rate, device.is_cpu) == (5e9, 7e9, True)
