"""Speed, memory, accuracy and batch invariance of rl_logp and its peers, from one run."""
