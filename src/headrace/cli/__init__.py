"""The `headrace` command: one small file for each of its commands, imported when it is used."""
