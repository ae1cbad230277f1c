"""The engine alone as a server: OpenAI's completions and chat over HTTP, with the token ids and versions that RL needs.

`app` is the HTTP side, and the only file that knows aiohttp. `body` reads JSON fields, `requests` makes a checked request of
them, `chat` and `tools` a chat's prompt. `calls` generates the choices and resumes them when new weights interrupt, `text`
turns tokens into text as they come, `answers` builds OpenAI's objects. `control` pauses, resumes and scores.
"""
