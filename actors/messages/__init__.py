"""The messages between actors.  They import no actor, so any two actors can share them without a circle.

    frontends -Render-> Renderer -Track-> Detokenizer
                        Renderer -Admit-> Scheduler -StepPlan-> Executor -StepDone | StepFailed-> Scheduler
                                          Scheduler -StepTokens-> Detokenizer -Stop-> Scheduler
    or, in an engine that pools:
                        Renderer -AdmitPooling-> Scheduler -PoolPlan-> Executor -PoolDone | StepFailed-> Scheduler
                                          Scheduler -Pooled-> Pooler
    frontends -Abort | SetPause | ResetPrefixCache | Step | Probe-> Scheduler
    frontends, Scheduler -DeviceCall-> Executor
    Scheduler, Detokenizer -StepStats | OutputStats-> Observer

`requests` enter the engine, `steps` go to the device and back, `outputs` go on to the clients and to the observer.
`controls` steer the engine, and list the messages that each actor may receive.  `sinks` are the writing ends that a message
lends to its receiver.
"""
