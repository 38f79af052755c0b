"""`headrace doctor`: what limits an engine, with the numbers that show it, and what to change.

    live server, two scrapes ─┐
    record or job summary    ─┼▶ readers/ ─▶ Evidence ─▶ rules/ ─▶ diagnosis.py ─▶ report.py (terminal, JSON)
    planned command line     ─┘                │
                                               └ estimates.py: plan's roofline and memory for this model and GPU

- `evidence.py`: the facts that rules judge. A fact that is not known is None, and a rule that needs it is reported as
  not judged. It is never taken for good.
- `rules/`: one function for each rule, with the guides' rule that it applies, its threshold and its advice.
- `diagnosis.py`: runs the rules, names the bottleneck first and ranks the other findings by predicted gain.
- `fix.py`: `--fix`, which measures each advised change against the settings as they are.

Figures are of an interval: counters are differences, and quantiles come from differences of buckets. The thresholds of
a job's bottleneck are those of `jobs/status/bottleneck.py`. Imports no torch.
"""

from __future__ import annotations

from headrace.doctor.diagnosis import Diagnosis, diagnose
from headrace.doctor.evidence import Evidence

__all__ = ["Diagnosis", "Evidence", "diagnose"]
