"""Other servers on the same weights, cores and client: installed into build/peers, started, measured in alternation."""
