"""`headrace route`: one address in front of several OpenAI-compatible servers, its replicas.

    client ─▶ http/protocol, http/gate     the same limits as a server: headers, body, time to read
           ─▶ app                          finds out the prompt's prefix, asks the fleet for a replica, passes bytes on
           ─▶ fleet ─▶ affinity            which replica has computed this prefix: hashes of the prompt's chunks
                    ─▶ choice              prefix against load: a pure function
                    ─▶ health              score of a replica; taken out, tried again with one request
           ─▶ upstream                     HTTP/1.1 connections to a replica, with backpressure

    scraping    once in a second: is a replica ready, how many requests wait and run there
    sources     where replicas come from: addresses, a file, a DNS name
    desired     the number of replicas that the load needs
    metrics     /metrics and /replicas of the router
    options     its settings, from which flags are generated; serve: builds the parts and runs them

The router reads a request's body and never an answer's: it only looks for the ends of events, so that an error can be
added to a stream whose replica has died. A request is sent to another replica as long as its client has received no
byte. All of it runs in one event loop, without a lock. It imports no torch.
"""

from __future__ import annotations
