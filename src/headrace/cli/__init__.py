"""The `headrace` command: one file per subcommand, imported when it is used.

    main.py                             finds the subcommand; reports errors in one line
    run, status, cancel, clean          batch jobs
    serve.py                            the server; settings_file.py reads --config, removed_flags.py other flags
    alerts.py                           rules for Prometheus
    chat.py, conversation.py            a chat in the terminal
    models.py, fetching.py              the model cache; download progress
    parser.py                           argparse with short errors and a suggestion for unknown options
    engine_flags.py, sampling_flags.py  flags generated from the fields of the settings

A command that only prints imports neither torch nor numba. `serving_table.py` and `removed_flags.py` generate tables of
docs/serving-operations.md and docs/coming-from-vllm.md.
"""
