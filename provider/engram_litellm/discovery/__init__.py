"""Where the replicas of a model are: explicit addresses, the local mode's file, EndpointSlices, then DNS."""
