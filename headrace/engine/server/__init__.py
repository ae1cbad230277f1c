"""The engine alone as a server: OpenAI's completions and chat over HTTP, with the token ids and versions that RL needs.

`app` is the HTTP side, and the only file that knows aiohttp; `body` reads JSON fields; `requests` understands a request and
refuses what cannot be done, `chat` and `tools` the part that makes a chat's prompt; `calls` generates the choices, resumed as
often as new weights interrupt them; `text` turns tokens into text as they come; `answers` writes what OpenAI's clients read;
`control` pauses, resumes and scores; `metrics` counts; `address` binds.
"""
