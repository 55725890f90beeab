"""Talks to the server of examples/serve.sh as any OpenAI client does.

python examples/serve_client.py [http://127.0.0.1:8000/v1]
"""

from __future__ import annotations

import sys

from openai import APIConnectionError, OpenAI

PROMPT = "def factorial(n):\n    "


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    client = OpenAI(base_url=url, api_key="none")
    try:
        model = client.models.list().data[0].id
    except APIConnectionError:
        sys.exit(f"no server at {url}: start examples/serve.sh and wait for its startup")

    print("greedy, streamed:", PROMPT, sep="\n", end="")
    options = {"model": model, "prompt": PROMPT, "max_tokens": 40}
    for chunk in client.completions.create(temperature=0.0, stream=True, **options):
        print(chunk.choices[0].text, end="", flush=True)

    sampled = client.completions.create(temperature=0.8, seed=7, n=2, **options)
    for choice in sampled.choices:
        print(f"\n\nsampled, {choice.index}:", PROMPT + choice.text, sep="\n", end="")
    print()


if __name__ == "__main__":
    main()
