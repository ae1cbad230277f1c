"""The engine alone as a server: OpenAI's completions and chat over HTTP, with the token ids and versions that RL needs.

`requests` reads what is asked and refuses what cannot be done, `chat` and `tools` the part of it that makes a chat's prompt;
`calls` draws the choices, resumed as often as new weights interrupt them; `text` turns tokens into text as they come, and
`tool_calls` finds in it the tools a model calls; `answers` writes what OpenAI's clients read; `metrics` counts; `address`
binds; `app` puts them behind HTTP and is the only file that knows aiohttp.
"""
