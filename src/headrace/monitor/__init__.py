"""What a running system says of itself: metrics, and later alerts and a live view."""

from __future__ import annotations
