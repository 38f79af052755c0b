"""The engine: from a request to sequence events, and from events to answers.

    front's thread       text ─▶ token ids ─▶ client.submit          checks refuse what could never run
                                                  │ inbox
    engine's thread      loop: plan a step ─▶ submit it ─▶ apply the results of an earlier step ─▶ events
                                                                                                     │
    front's thread       outputs ◀─ detokenizer, stop strings ◀─ answers ◀───────────────────────────┘

    llm.py, async_engine.py        the fronts `LLM` and `AsyncEngine`
    llm_*.py, async_*.py           their embeddings and scores, adapters and beam search
    prompts.py, readouts.py        prompts to token ids; requests for embeddings and scores
    answers.py, answer_stream.py   events to outputs; several requests as one asyncio stream (event_queue.py)
    event_dispatch.py              events of all engines of a front to the readers on its event loop
    readout_stream.py              the same stream for embeddings and scores; submission.py is what both have in common
    beam_search.py                 beam search, built on requests for one token
    client.py, loop.py, core.py    submit and abort from any thread; the loop on its thread; one step
    process/                       the same client for an engine in its own process, with restarts
    group.py, shares.py            the same client for several of these; what each gets of the machine
    joined_stats.py                the counters of several engines as those of one
    start.py, resolve.py           loads an engine; decides each setting (settings.py) and gives the reason: resolve.py
                                   has the map of the files for this
    settings_file.py               settings from a TOML file
    reconfigure.py                 other settings for a loaded model
    in_force.py                    every setting of a running engine, with its source, for records and /server_info
    grammars.py, constraints.py    compiled grammars; the matcher state of each running sequence
    reasoning_gate.py              where a model's reasoning ends and the grammar of its answer starts
    checks.py, offline_order.py    refuses requests that cannot run; start order and concurrency of offline work

Modules meet at three points: `core` (the plan meets the device), `client` (a front meets an engine) and, below this
package, `kernels.ops` (a model meets the device). A sequence is either watched (`Request.watched`: an event per
step, for streams and requests with stop strings), announced (`Request.announced`: one event with its first token) or
reported once at its end.

This package imports nothing on its own: import from its modules, some of which need torch.
"""
