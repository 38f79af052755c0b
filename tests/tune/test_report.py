"""What the report of a tune says, in all of its forms."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.record import write_record
from headrace.bench.report.document import Chart, Code, Details, Note, Part, Report, Section, Table, text_of
from headrace.bench.report.markdown import markdown
from headrace.bench.report.page import page
from headrace.bench.report.terminal import print_report
from headrace.cli.main import main
from headrace.tune.report import tune_report
from tests.tune.report_builders import (
    BEST,
    batch_record,
    interrupted_record,
    no_difference_record,
    nothing_measured_record,
    serve_record,
    single_record,
)

ALL = (
    batch_record,
    serve_record,
    no_difference_record,
    single_record,
    interrupted_record,
    nothing_measured_record,
)
CHOSEN = "max_num_seqs=128, max_num_batched_tokens=2048"


def titles(report: Report) -> list[str]:
    return [section.title for section in report.sections]


def section(report: Report, start: str) -> Section:
    return next(each for each in report.sections if each.title.startswith(start))


def table(part: Section | Details, number: int = 0) -> Table:
    return [each for each in part.parts if isinstance(each, Table)][number]


def rows(part: Section | Details, number: int = 0) -> list[list[str]]:
    return [[text_of(cell) for cell in row] for row in table(part, number).rows]


def notes(part: Section) -> str:
    return " ".join(each.text for each in part.parts if isinstance(each, Note))


def charts(report: Report) -> dict[str, Chart]:
    found: dict[str, Chart] = {}

    def collect(parts: Any) -> None:
        for part in parts:
            if isinstance(part, Chart):
                found[part.title] = part
            elif isinstance(part, Details):
                collect(part.parts)

    for each in report.sections:
        collect(each.parts)
    return found


def terminal(report: Report) -> str:
    stream = io.StringIO()
    print_report(report, stream)
    return stream.getvalue()


def missing(report: Report) -> dict[str, str]:
    return {row[0]: row[1] for row in rows(section(report, "Not in this report"))}


@pytest.mark.parametrize("build", ALL)
def test_every_form_starts_with_the_decision(build: Any) -> None:
    record = build()
    report = tune_report(record)
    text = record["decision"]["text"] if record["decision"] else "nothing was decided"
    assert terminal(report).splitlines()[0].startswith(text)
    assert markdown(report).splitlines()[0].replace("\\", "").startswith(f"# {text}")
    assert f"<h1>{text}" in page(report)
    assert page(report).count("<h1>") == 1


@pytest.mark.parametrize("build", ALL)
def test_a_record_that_was_written_and_read_gives_a_whole_page(build: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.tune.json"
    write_record(build(), path)
    html = page(tune_report(json.loads(path.read_text())))
    assert html.endswith("</html>\n") and "<script" not in html and "http:" not in html.replace("http://www.w3.org", "")
    assert html.count("<svg") == html.count("</svg>")
    assert "NaN" not in html and "None" not in html


def test_the_settings_are_a_command_and_a_file() -> None:
    chosen = section(tune_report(batch_record()), "The chosen settings")
    command, file = [part for part in chosen.parts if isinstance(part, Code)]
    assert chosen.title.endswith(CHOSEN)
    assert "--max-num-seqs 128 --max-num-batched-tokens 2048" in command.text
    assert (file.caption, file.text) == (
        "Settings file (TOML)",
        "max_num_seqs = 128\nmax_num_batched_tokens = 2048\n",
    )


def test_finalists_are_compared_with_the_default_and_the_noise_is_said() -> None:
    record = batch_record()
    part = section(tune_report(record), "Finalists")
    found = rows(part)
    assert [row[0] for row in found] == ["default", CHOSEN, f"{CHOSEN}, kv_cache_dtype=fp8"]
    decision = record["decision"]
    assert found[1][3] == f"{decision['ratio']:.2f}x [{decision['low']:.2f}, {decision['high']:.2f}]"
    assert found[1][4] == "better, chosen" and found[2][4] == "better"
    assert found[1][5] == "6"
    assert f"below {100 * record['noise']['floor']:.1f} % cannot be told from noise" in notes(part)


def test_the_table_and_the_decision_have_the_same_digits(tmp_path: Path) -> None:
    """A record has few digits, but 1.2349 must not become 1.235 and then 1.24."""
    record, path = batch_record(), tmp_path / "a.json"
    record["decision"] |= {"ratio": 1.2349, "low": 1.20499, "high": 1.26499}
    write_record(record, path)
    assert rows(section(tune_report(json.loads(path.read_text())), "Finalists"))[1][3] == "1.23x [1.20, 1.26]"


def test_a_difference_that_is_not_shown_is_said_to_be_none() -> None:
    record = no_difference_record()
    report = tune_report(record)
    assert report.headline.startswith("no difference shown")
    assert section(report, "The default").parts
    found = rows(section(report, "Finalists"))
    assert found[1][4] == "no difference shown"
    assert found[0][4] == "chosen"


def test_a_gain_below_the_noise_floor_is_no_difference() -> None:
    record = batch_record()
    record["noise"] = {"ratio": 1.0, "low": 0.5, "high": 1.5, "floor": 0.5, "num_rounds": 6}
    assert rows(section(tune_report(record), "Finalists"))[1][4] == "no difference shown"


def test_noise_that_is_no_noise_is_doubted() -> None:
    record = batch_record()
    record["noise"] = record["noise"] | {"ratio": 1.03, "low": 1.02, "high": 1.04}
    assert "does not hold 1" in notes(section(tune_report(record), "Finalists"))
    assert "does not hold 1" not in notes(section(tune_report(batch_record()), "Finalists"))


def test_the_race_names_who_entered_was_kept_and_was_added() -> None:
    race = section(tune_report(batch_record()), "The race")
    assert rows(race)[0] == ["1", "96", "13", "5", "1"]
    (details,) = [part for part in race.parts if isinstance(part, Details)]
    first, second, third = rows(details)
    assert "max_num_seqs=16" in first[1].split("; ") and "max_num_seqs=16" not in first[2].split("; ")
    assert first[3] == CHOSEN
    assert CHOSEN in second[1].split("; ") and CHOSEN in third[2].split("; ")
    ratios = {row[0]: row[1:] for row in rows(race, 1)}
    assert ratios[CHOSEN][0] == "" and ratios[CHOSEN][1].endswith("x")
    assert ratios["max_num_seqs=16"][1:3] == ["", ""]
    assert [ratios[name][-1] for name in (CHOSEN, "max_num_seqs=16")] == ["finalist", "dropped"]
    svg = charts(tune_report(batch_record()))["The race: ratio to the default in each rung"].svg
    others = [row for row in batch_record()["configs"] if not row["is_finalist"] and not row["is_default"]]
    assert svg.count("quiet-mark") == sum(len(row["trials"]) for row in others) == 15


def test_ratios_are_to_the_default_of_the_same_round() -> None:
    """The drift of a round, which the builder makes, must cancel out."""
    record = batch_record()
    for row in record["configs"]:
        for trial in row["trials"]:
            if trial["rung"] == 2:
                trial["value"] *= 3
    again = rows(section(tune_report(record), "The race"), 1)
    assert again == rows(section(tune_report(batch_record()), "The race"), 1)


def test_each_value_of_a_knob_has_its_effect() -> None:
    part = section(tune_report(batch_record()), "Effect of each knob")
    found = {(row[0], row[1]): row for row in rows(part)}
    assert found["max_num_seqs", "64"][2] == "default" and found["max_num_seqs", "64"][4] == "1.00x"
    assert found["max_num_seqs", "128"][2] == "this knob alone" and found["max_num_seqs", "128"][6] == "4"
    assert 1.15 < float(found["max_num_seqs", "128"][4][:-1]) < 1.27
    low, high = found["max_num_seqs", "128"][5].split(" to ")
    assert float(low[:-1]) <= 1.21 < 1.33 <= float(high[:-1])
    assert found["enable_prefix_caching", "false"][3] == "restart"
    assert ("block_size", "8") not in found  # it failed
    assert rows(part)[0][0] == "max_num_seqs"  # the largest effect first


def test_a_value_that_was_only_measured_with_others_says_so() -> None:
    record = batch_record()
    record["configs"] = [row for row in record["configs"] if row["settings"] != {"max_num_seqs": 128}]
    found = {(row[0], row[1]): row for row in rows(section(tune_report(record), "Effect of each knob"))}
    assert found["max_num_seqs", "128"][2] == "with other changes, median"


def test_failures_say_what_they_ruled_out() -> None:
    report = tune_report(batch_record())
    part = section(report, "Failures")
    failed = {row[0]: row[1:] for row in rows(part)}
    assert failed["max_num_seqs=256"][:2] == ["start", "oom"]
    assert failed["max_num_seqs=256"][3] == "max_num_seqs=256, max_num_batched_tokens=4096"
    assert failed["block_size=8"][3] == "only itself"
    assert rows(part, 1)[0][1] == "max_num_seqs=256"
    svg = charts(report)["What failed, and what it ruled out"].svg
    assert ">✗ failed<" in svg and ">– ruled out<" in svg and ">✓ ok<" in svg
    assert svg.count("cell-bad") == 1 and svg.count("cell-unsure") == 1
    assert "out of memory" in page(report)  # the end of the log


def test_the_prediction_is_judged_in_words() -> None:
    record = batch_record()
    part = section(tune_report(record), "Predicted against measured")
    assert "Rank correlation (Spearman) 0.9" in notes(part) and "nearly the measured one" in notes(part)
    assert len(rows(part)) == 9  # measured ones with a prediction
    for row in record["configs"]:
        if row["predicted"]:
            row["predicted"] = {key: 100_000 / value for key, value in row["predicted"].items()}
    assert "nearly the reverse" in notes(section(tune_report(record), "Predicted against measured"))


def test_a_server_has_its_trade_off_and_latencies() -> None:
    report = tune_report(serve_record())
    assert {
        "Output tokens/s against TTFT p95, by load level",
        "Output tokens/s against TPOT p95, by load level",
        "Time to first token",
        "Time per output token",
        "End-to-end latency",
    } <= set(charts(report))
    assert "SLO: ttft:p95&lt;300ms" in charts(report)["Output tokens/s against TTFT p95, by load level"].svg
    levels = next(each for each in section(report, "Throughput").parts if isinstance(each, Details))
    assert ["default", "8 concurrent"] in [row[:2] for row in rows(levels)]
    latencies = rows(section(report, "Latency distributions"))
    assert [row[:2] for row in latencies[:2]] == [["TTFT", "default"], ["TTFT", f"chosen: {CHOSEN}"]]
    assert float(latencies[1][2].split()[0]) < float(latencies[0][2].split()[0])
    assert "Load of all rounds: 16 concurrent." in notes(section(report, "Finalists"))
    assert "Not in this report" not in titles(report)


def test_finalists_at_different_loads_show_them() -> None:
    record = serve_record()
    for row in record["configs"]:
        if row["settings"] == BEST:
            for trial in row["trials"]:
                trial["load"] = trial["load"] | {"concurrency": 24}
    found = table(section(tune_report(record), "Finalists"))
    assert found.columns[-2] == "load"
    assert [text_of(row[-2]) for row in found.rows] == ["16 concurrent", "24 concurrent", "16 concurrent"]


def test_what_is_missing_is_said_with_its_reason() -> None:
    assert missing(tune_report(batch_record())) == {"latency distributions": "a batch is measured as a whole run"}
    without_speed = missing(tune_report(no_difference_record()))
    assert "no speed of one sequence" in without_speed["Pareto curve"]
    assert without_speed["predicted against measured"] == "no measured config has a prediction"
    alone = missing(tune_report(single_record()))
    assert alone["the race"] == "there is only one config, so nothing to compare"
    interrupted = missing(tune_report(interrupted_record()))
    assert interrupted["finalists against the default"] == "no round of the confirmation was finished"


def test_an_interrupted_search_says_that_its_choice_is_not_confirmed() -> None:
    report = tune_report(interrupted_record())
    assert any("Ctrl-C" in warning for warning in report.warnings)
    assert any("nothing was confirmed" in warning for warning in report.warnings)


def test_a_search_without_a_result_says_why() -> None:
    report = tune_report(nothing_measured_record())
    assert report.headline == "nothing was decided: the default does not start: out of memory"
    assert "There is no settings file" in notes(section(report, "Result"))


def test_answers_that_may_change_are_compared() -> None:
    quality = section(tune_report(batch_record()), "Quality")
    assert rows(quality)[0] == ["kv_cache_dtype=fp8", "94.7 %", "2048", "32"]
    assert "no agreement with the default was measured" in notes(
        section(tune_report(batch_record(quality=[])), "Quality")
    )
    assert "Quality" not in titles(tune_report(no_difference_record()))


def test_names_that_do_not_say_their_settings_stand_beside_them() -> None:
    record = batch_record()
    assert "settings" not in table(section(tune_report(record), "Finalists")).columns
    for row in record["configs"]:
        if row["settings"] == BEST:
            row["name"] = "both"
    record["decision"]["chosen"] = "both"
    found = table(section(tune_report(record), "Finalists"))
    assert found.columns[1] == "settings"
    assert text_of(found.rows[1][1]) == "max_num_seqs = 128, max_num_batched_tokens = 2048"


def test_hostile_names_and_logs_stay_text() -> None:
    bad = "<script>alert(1)</script>"
    record = json.loads(json.dumps(batch_record()).replace("max_num_seqs=256", bad))
    record["configs"][4]["failure"]["log_tail"] = bad
    record["warnings"] = [bad]
    html = page(tune_report(record))
    assert "<script" not in html and "&lt;script" in html


def test_bench_report_prints_a_record_of_a_tune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, html, text = tmp_path / "a.tune.json", tmp_path / "a.html", tmp_path / "a.md"
    write_record(batch_record(), path)
    assert main(["bench", "report", str(path), "--html", str(html), "--markdown", str(text)]) == 0
    assert capsys.readouterr().out.startswith("tuned against default: 1.3")
    assert "<h1>tuned against default: 1.3" in html.read_text()
    assert text.read_text().startswith("# tuned against default: 1.3")


def test_every_chart_has_a_title_and_named_axes() -> None:
    parts: list[Part] = [*charts(tune_report(serve_record())).values(), *charts(tune_report(batch_record())).values()]
    assert len(parts) >= 12
    for chart in parts:
        assert isinstance(chart, Chart)
        assert chart.title and 'class="axis"' in chart.svg and f'aria-label="{chart.title}"' in chart.svg
