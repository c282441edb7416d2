"""`tokring bench frontend`: what a token costs the server process on its way from the engine to a client's socket."""
