"""The engine alone as a server: OpenAI's completions and chat over HTTP, with the token ids and versions that RL needs.

`app` is the HTTP side and `http` what it shares with the endpoint of agents; no other file knows aiohttp. `body` reads JSON
fields, `requests` makes a checked request of them, `chat` a chat's prompt; `grammar` compiles what an answer is held to.
`completion` generates the choices, resumes them when new weights interrupt, and builds OpenAI's objects; `text` turns tokens
into text as they come, `tool_calls` finds the calls in it.
"""
