"""The server and client app that both sides of a comparison run."""
