"""A parsed metrics page, for assertions."""

from __future__ import annotations

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from headrace.monitor import ServerMetrics


class Page:
    def __init__(self, text: str) -> None:
        self.text = text
        self.families: dict[str, Metric] = {}
        for family in text_string_to_metric_families(text):
            assert family.name not in self.families, f"{family.name} is exported twice"
            self.families[family.name] = family
        self._samples = [sample for family in self.families.values() for sample in family.samples]

    def labels(self, name: str) -> list[dict[str, str]]:
        """Return the labels of each sample with this name."""
        return [dict(sample.labels) for sample in self._samples if sample.name == name]

    def value(self, name: str, **labels: str) -> float:
        """Return the value of the only sample with this name and at least these labels."""
        (value,) = [s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items()]
        return float(value)

    def bounds(self, name: str) -> list[float]:
        return [float(labels["le"]) for labels in self.labels(f"{name}_bucket")]


def page_of(metrics: ServerMetrics) -> Page:
    return Page(metrics.render()[0].decode())
