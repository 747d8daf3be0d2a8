"""A server and its listeners as discrete events: the broker's own code decides, and only stages, sockets and ears are simulated."""
