"""What every controller needs of a cluster: a client, a work queue, a cache of watched objects, one leader.

Nothing here knows what an EngramModel is. Controllers stand above this package, kopf's wiring above them.
"""
