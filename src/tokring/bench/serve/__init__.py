"""`tokring bench serve`: load on any OpenAI-compatible server, several of them in alternation."""
