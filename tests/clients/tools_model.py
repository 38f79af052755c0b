"""The embedded model with a chat template that shows tools, for agents: their requests leave the choice to the model.

The model was not trained for tools: calls are forced, and what it writes afterwards is any text.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}Tools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}
To call one, write <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' and tools %}{% continue %}{% endif %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_tools_model(source: Path, target: Path) -> None:
    command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--force", "--chat-template", TEMPLATE]
    subprocess.run([*command, str(source), str(target)], check=True, capture_output=True)
