"""Make a model for agents: one layer of random weights, with a long context and a chat template for tools."""

import json
import shutil
from pathlib import Path

DEMO = Path(__file__).parents[2] / "trouper" / "demo"
CONTEXT = 131_072
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}A call is <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{%- elif message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_model(folder):
    """Write the model's folder, to be loaded with dummy weights."""
    config = json.loads((DEMO / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "max_position_embeddings": CONTEXT}
    tokenizer = json.loads((DEMO / "tokenizer_config.json").read_text())
    tokenizer |= {"model_max_length": CONTEXT, "chat_template": TEMPLATE}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    shutil.copy(DEMO / "tokenizer.json", folder)
    return folder
