"""A stock vLLM server as an engine: `api` speaks its HTTP interface, `server` starts one, `engine` is the protocol over it."""
