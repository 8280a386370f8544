"""The peer watch: which ranks are gone, which are late, and what each of them is doing.

It diagnoses and never decides: the ranks' steps are agreed on in the exchange alone. `tree` says
who is connected to whom, `status` what is told, `wire` how, `rendezvous` how the connections come
about, `watcher` is the thread that keeps them.
"""
