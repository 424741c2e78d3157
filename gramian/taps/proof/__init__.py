"""The row proof: a check by test runs that the gradient which the taps attribute to a sample is that sample's gradient.

The taps attribute rows (a_i, g_i) of inputs a and output gradients g of every call of a layer to sample i, by their place in
the batch. The shapes only suggest that this is right; the proof checks it on the user's model, and raises an error that names a
layer if it is not. With samples x, outputs y, parameters θ and random output gradients c (cotangents), two properties suffice:

    ∂(a_i, g_i)/∂x_j = 0 for i ≠ j          (rows depend on their own sample alone)
    Σ_i tap(a_i, g_i) = ∇_θ Σ_i ⟨c_i, y_i⟩   (the taps' sum is autograd's gradient, for random cotangents c)

For then g_j is linear in the cotangent c_j of its own sample and vanishes with it. With all cotangents but c_i set to zero, the
second line reads tap(a_i, g_i) = ∇_θ ⟨c_i, y_i⟩: what is attributed to sample i is the gradient of its own output. The runs
that show both properties, each one forward and one backward from the same random states, buffers and attributes:

1. Sums. The model runs without and with taps: the outputs are equal, and for every parameter the taps' sum is autograd's
   gradient. The run without taps has half the loss, so a backward that is not linear (a hook that normalises) is found.
2. Replacements. Number the B samples at random and write the numbers in ⌈log₂ B⌉ bits. For each bit and each of its two values,
   replace the samples whose bit has that value by others of the batch: 2⌈log₂ B⌉ runs. Two different numbers differ in some
   bit, so for every ordered pair (i, j) there is a run in which i stays while j is replaced. Rows of samples that stay must be
   unchanged, bit for bit if two runs of the same batch are equal bit for bit.
3. Order and single units. In the reversed batch the rows are reversed, and one unit (a sample, or a group of rows that counts
   as one) has the same gradient alone as in the batch. This finds rows that depend on their place in the batch, and samples
   that depend on padding to the longest sample.

Files:

| file | concept |
|---|---|
| `row_proof` | when a proof runs: on the first batch of every structure of inputs, and for layer calls that no proof has seen |
| `batch_structure` | the structure of a batch: one proof covers all batches of the same structure |
| `batch_proof` | one batch: which outputs are proven together, and axes that may have size B by chance |
| `prover` | the three parts above, for one set of outputs |
| `row_comparison` | whether rows of two runs are equal, and the taps' sums equal to autograd's, up to rounding |
| `single_unit` | the gradient of one unit alone against the same unit in the batch |
| `evaluation_mode` | part 3 of models with dropout runs without dropout |
| `carried_state` | under privacy: no sample may influence a later batch through buffers and attributes |
| `proof_runs`, `row_recorder`, `row_fingerprint` | one run, what it records, and a fingerprint (40 bytes) of each row |
| `sample_arguments`, `model_outputs`, `output_kinds`, `compiled_arguments` | arguments and outputs by sample |
| `isolated_runs` | runs after which the user's model is restored |
| `remedies` | where the proof fails: samples on other axes, layers tapped as one, copies of what has no batch axis |
"""
