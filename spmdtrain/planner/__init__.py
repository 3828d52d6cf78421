"""Predicts without the hardware: does a run fit, how fast is it, which layout is best.

No lower room imports this.

Start reading at `estimate.estimate`. The path of `spmdtrain estimate` to its number:

    cli/planning/estimate.py reads the options and calls
    estimate.py              estimate: settings become a Workload, a Hardware and a Software
    cost/step_time.py        step_time: seconds, term by term, which add up
    cost/layer_time.py       the terms of one layer
    cost/kernel_time.py      seconds of one matmul, one attention, one pass over memory
    cost/memory.py           step_memory: bytes, category by category
    report.py                estimate_text or estimate_values: what is printed

The three descriptions that every formula takes:

    cost/workload.py         what runs: settings, layout, what was counted
    cost/hardware.py         on what: a device in its box, off its data sheet
    cost/software.py         how well: the shares that a framework reaches; fitted constants

Parts of the formulas:

    cost/shape.py            widths and parameters of the model
    cost/trained_weights.py  the part of it that is trained
    cost/collective_time.py  seconds of an all-reduce, an all-gather, a send
    cost/overlap.py          the hidden share of them, read off compiled steps
    cost/experts.py          what the exchange of a layer's experts moves
    cost/schedules.py        closed forms of the pipeline schedules, looked up by name
    cost/flops.py            FLOPs as papers count them

One file per other question:

    plan.py                  spmdtrain plan: every layout, ranked
    compiled_plans.py        spmdtrain plan --compile: the best layouts, ranked again by XLA
    plan_rules.py            spmdtrain plan --rules: how to use the tensor axis
    inference.py             spmdtrain estimate --generate: prefill and decode
    anchor.py                spmdtrain estimate --anchor: scaled by a measured run
    deviceless.py            spmdtrain estimate --compile: XLA's own figures, without a GPU
    calibrate.py             spmdtrain calibrate: measures this machine into a hardware file

Words. A *layout* is a mesh shape with a microbatch, a schedule and its chunks, remat and ZeRO. A
*term* is one summand of a step's seconds. *Hidden* seconds overlap with work and do not count;
*exposed* ones do. A *send* moves the activations of one microbatch, or their gradient, between
neighbouring stages (the breakdown calls it `pipeline_hops`, the schedules a hop).

benchmarks/planner/ holds the published runs against which the formulas are judged.
"""
