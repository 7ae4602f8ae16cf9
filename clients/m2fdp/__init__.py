"""M2FDP on the client: devices, aggregators, and the messages that they seal for each other."""
