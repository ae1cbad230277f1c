"""A stock vLLM server as an engine: `server` starts one, `api` speaks its HTTP interface, `engine` implements the protocol."""
