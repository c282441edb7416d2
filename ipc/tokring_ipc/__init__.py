"""Lock-free shared-memory rings between an HTTP front end and an EngineCore."""
