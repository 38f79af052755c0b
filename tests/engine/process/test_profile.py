from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace import AsyncEngine, SamplingParams
from headrace.engine.process.engine_process import EngineProcess
from headrace.engine.profiler import ProfileOptions
from headrace.errors import EngineDeadError, ProfilerError
from headrace.profile.trace import read_profile

pytestmark = pytest.mark.processes


@pytest.mark.slow
def test_an_engine_in_its_own_process_is_profiled_there(tiny_directory: Path, tmp_path: Path) -> None:
    async def main() -> None:
        engine = await AsyncEngine.start(
            str(tiny_directory), own_process=True, max_num_seqs=4, num_gpu_blocks_override=256, num_threads=1
        )
        try:
            options = ProfileOptions(directory=str(tmp_path), name="own")
            started = await engine.start_profile(options)
            assert started["name"] == "own"
            with pytest.raises(ProfilerError, match="already being recorded"):
                await engine.start_profile(options)
            params = SamplingParams(max_tokens=12, ignore_eos=True)
            async for _ in engine.generate([5, 6, 7], params):
                pass
            record = await engine.stop_profile()
            assert record["window"]["num_steps"] >= 12
            with pytest.raises(ProfilerError, match="no profile is being recorded"):
                await engine.stop_profile()
        finally:
            await engine.close()

    asyncio.run(main())
    found, trace = read_profile(tmp_path / "own.profile.json")
    assert found is not None and trace is not None
    assert sum(step.num_tokens for step in found.steps) == 3 + 11
    assert sum(event.name == "headrace.execute" for event in trace.events) == 12


def test_a_profile_of_an_engine_that_dies_is_an_error() -> None:
    process = EngineProcess(lambda events: None, lambda: None, core="no.such.module:core")
    answer = process.start_profile(ProfileOptions(directory="x"))
    process.kill("no longer wanted")
    with pytest.raises(EngineDeadError, match="no longer wanted"):
        answer.result(timeout=60)
    with pytest.raises(EngineDeadError):
        process.stop_profile()
