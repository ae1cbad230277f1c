"""The transport `http`."""
