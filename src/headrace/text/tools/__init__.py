"""Tool calls in an answer, and the grammars that force them.

    parser.py                                 `ToolParser`, the base of all formats: states, text, deltas
    call_lists.py                             the base of formats that are lists of calls
    hermes.py, llama.py, mistral.py, json_lists.py, headed.py, tagged.py, pythonic.py      the formats
    calls.py, json_calls.py, xml_calls.py, python_calls.py   one call, as far as it has arrived, in each notation
    values.py, json_scanner.py                values of arguments as JSON
    grammar.py, rules.py                      the grammar of an answer that must call a tool

They are listed in `text/tool_calls.py`, which chooses one by name or by the model's chat template.
"""
