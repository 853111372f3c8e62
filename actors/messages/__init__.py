"""The messages that actors send to each other: a leaf that imports none of them.

    frontends -Render-> Renderer -Track-> Detokenizer
                        Renderer -Admit-> Scheduler -StepPlan-> Executor -StepDone | StepFailed-> Scheduler
                                          Scheduler -StepTokens-> Detokenizer -Stop-> Scheduler
    or, in an engine that pools:
                        Renderer -AdmitPooling-> Scheduler -PoolPlan-> Executor -PoolDone | StepFailed-> Scheduler
                                          Scheduler -Pooled-> Pooler
    frontends -Abort | SetPause | ResetPrefixCache | Step | Probe-> Scheduler
    frontends, Scheduler -DeviceCall-> Executor
    Scheduler, Detokenizer -StepStats | OutputStats-> Observer

`requests` go into the engine, `plans` to the device, `results` come back from it, `outputs` go on to
the clients; `controls` steer the engine and `stats` describe it.  `inboxes` says what each actor may
receive.  `promise` and `sinks` are the writing ends that a message lends to its receiver.
"""
