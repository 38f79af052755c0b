"""One engine on several nodes. Node 0 has rank 0, with the scheduler and the front; the others only host ranks.

    node 0: the engine's process                               node I: headrace serve MODEL --headless --node-rank I
    RankProcesses ─▶ NodeLink ══ TCP, one message per step ══▶ NodeHost ─▶ socket pairs ─▶ its ranks
                  └▶ its own ranks, by socket pairs            collectives go from rank to rank, not this way

- `handshake.py`: both ends prove that they know the secret of the nodes. `wire.py`: the messages of the channel.
- `node_listener.py`: node 0's socket, which takes the other nodes until all have joined.
- `node_link.py`: the channel of node 0 to one node. `other_nodes.py`: listener and links together.
- `node_host.py`: the process of another node. `on_ray.py`: starts it on nodes of a Ray cluster
  (`ray_connection.py`).

Failure: both ends send heartbeats, and a channel that ends or is silent for `TIMEOUT_S` ends the engine on node 0 and
the ranks on the other side. A node whose engine has failed tries to join again for `REJOIN_S`: a restarted engine finds
it. A node that died is waited for, `JOIN_S` at each start of the engine.
"""
