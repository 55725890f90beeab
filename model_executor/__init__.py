"""vLLM's side of DDTree: config, worker, model runner and attention backend, all subclasses."""
