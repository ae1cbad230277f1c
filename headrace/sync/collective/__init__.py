"""The transport `collective`."""
