"""Starts every published config that is supported on a GPU that is not there. Run as a program; prints the failures."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from headrace.config import EngineConfig
from headrace.engine.dry_start import DryStart
from headrace.errors import UnsupportedModelError
from headrace.hardware import GpuFacts
from headrace.models.encoder_config import encoder_of_config

CONFIGS = Path(__file__).parents[1] / "models" / "data" / "published_configs.jsonl"
GPU = GpuFacts("a GPU with room for all of them", 1 << 42, 1 << 42, (9, 0))


def main() -> None:
    num_started = 0
    for line in map(json.loads, CONFIGS.read_text(encoding="utf-8").splitlines()):
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(line["config"]))
            # Between two sizes of graphs, as a small cache may choose it.
            config = EngineConfig(model=directory, load_format="random", max_model_len=512, max_num_seqs=100)
            try:
                launches = DryStart.of(config, GPU).launches()
            except UnsupportedModelError:
                continue
            min_launches = 4 if encoder_of_config(line["config"]) else 10  # an encoder does not decode
            assert len(launches) > min_launches, (line["checkpoint"], len(launches))
            num_started += 1
    sys.stdout.write(f"{num_started}\n")


if __name__ == "__main__":
    main()
