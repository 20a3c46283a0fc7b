"""What happens between modules: attention, streams, gates and routers, seen as operations of a check's pass."""
