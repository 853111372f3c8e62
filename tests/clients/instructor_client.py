"""instructor: a pydantic model as the answer, by a JSON schema and by a tool."""

import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel

HI = [{"role": "user", "content": "Do you like Python?"}]


class Reply(BaseModel):
    """A vote."""

    answer: Literal["yes", "no"]


def main(url, pooling_url):
    with OpenAI(base_url=f"{url}/v1", api_key="none") as openai:
        model = openai.models.list().data[0].id
        for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
            client = instructor.from_openai(openai, mode=mode)
            reply = client.chat.completions.create(
                model=model, messages=HI, response_model=Reply, max_tokens=64, max_retries=0
            )
            assert reply.answer in ("yes", "no")


if __name__ == "__main__":
    main(*sys.argv[1:])
