"""`headrace tune`: searches an engine's settings for a workload, and proves what it finds against the default.

    knobs.py       what may be changed, and to which values       shortlist.py   the configs that a race starts with
    goal.py        what is measured: batch or serve               trial.py       one measurement of one config
    effects.py     what each value does, by all rounds            race.py        rungs: who stays, what is merged
    pruning.py     what a failure rules out                       confirm.py     finalists against the default
    budget.py      how large rounds are, when to end              journal.py     trials on disk; resuming is replaying
    quality.py     greedy agreement with the default              forecast.py    plan's prediction of a config
    spec.py        what a search is asked for                     run.py         the loop
    result.py      the decision and the record                    report.py      the page, of report_*.py and charts.py
    ratios.py      figures of a record, read back

    default ─▶ knobs ─▶ shortlist ─▶ rung 1 ─▶ merge ─▶ rung 2 ─▶ merge ─▶ rung 3 ─▶ finalists and default, interleaved
                                        └──────────── a failure rules out what is larger ────────────┘

A config is a `SweepConfig`; `{}` is the engine's default. Every decision follows from the trials in the journal alone,
so that a search that was interrupted goes on as if it had not been. Imports no torch.
"""
