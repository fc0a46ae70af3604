use drumline_group::ProcessGroup;
use xxhash_rust::xxh3::xxh3_64;

use super::{DdpOptions, ParameterSpec, shards::Shards};
use crate::{Error, Result, failure};

/// Checks that all ranks hold the same model: the number, order, names, shapes and dtypes of `parameters`
/// (which are trained) and `buffers` (which are not), and the options. It passes over the tensors that the options
/// [ignore](DdpOptions::ignore).
///
/// All ranks must call this. If the models are equal, it takes one gather of three integers. If they differ,
/// bisection finds the first difference in log2(tensors) more gathers of one integer, however large the model
/// and the world are.
///
/// ```
/// use drumline::{DType, ddp::{DdpOptions, ParameterSpec, verify_model}};
///
/// drumline::local(2, |group| {
///     let weight = ParameterSpec::new("weight", [10 + group.rank()], DType::F32);
///     let differs = verify_model(&group, &[weight], &[], &DdpOptions::default());
///     assert!(differs.unwrap_err().to_string().contains("f32[11]"));
///     Ok(())
/// })?;
/// # Ok::<_, drumline::Error>(())
/// ```
///
/// # Errors
///
/// [`ModelsDiffer`](crate::ErrorKind::ModelsDiffer), the same on every rank, names the first tensor that differs, the ranks, and what
/// each of them has. [`Argument`](crate::ErrorKind::Argument) if the options ignore a tensor that there is not, or want
/// [shards](DdpOptions::shards) that this group or model cannot have. Also the errors of the
/// collectives.
pub fn verify_model(
    group: &ProcessGroup,
    parameters: &[ParameterSpec],
    buffers: &[ParameterSpec],
    options: &DdpOptions,
) -> Result<()> {
    let names = parameters.iter().chain(buffers).map(|spec| spec.name.as_str());
    let unknown = options.unknown_names(names);
    // The unknown names are compared, too: a rank that has some must not return while others wait for it.
    compare(group, parameters, buffers, options, &unknown)?;
    Shards::deal(parameters, options, group)?;
    match unknown[..] {
        [] => Ok(()),
        _ => Err(Error::argument(
            "DdpOptions::ignore",
            format!(
                "the model has no tensor or module `{}`; give paths as `named_tensors` or the error of a \
                 missing gradient shows them",
                unknown.join("`, `")
            ),
        )),
    }
}

fn compare(
    group: &ProcessGroup,
    parameters: &[ParameterSpec],
    buffers: &[ParameterSpec],
    options: &DdpOptions,
    unknown: &[&str],
) -> Result<()> {
    if group.world_size() == 1 {
        return Ok(());
    }
    let kept = |specs: &[ParameterSpec]| -> Vec<ParameterSpec> {
        specs.iter().filter(|spec| !options.ignores(&spec.name)).cloned().collect()
    };
    let (parameters, buffers) = (kept(parameters), kept(buffers));
    let entries = entries(&parameters, &buffers, options, unknown);
    let prefixes = prefix_digests(&entries);

    let counts = [parameters.len() as i64, buffers.len() as i64];
    let all = gather(group, &[counts[0], counts[1], prefixes[entries.len()]])?;
    let all: Vec<&[i64]> = all.chunks_exact(3).collect();
    if all.iter().all(|of_rank| *of_rank == all[0]) {
        return Ok(());
    }

    // All ranks see the same gathered numbers, so they take the same branches. A rank with fewer than
    // `middle` entries sends the digest of all its entries, which differs from that of a rank with more.
    let entries_of = |of_rank: &[i64]| {
        of_rank[0].saturating_add(of_rank[1]).max(0) as u64 + OPTION_ENTRIES as u64
    };
    let most = all.iter().map(|of_rank| entries_of(of_rank)).max().unwrap_or(0);
    let (mut equal, mut different) = (0, most);
    while different - equal > 1 {
        let middle = equal + (different - equal) / 2;
        let mine = usize::try_from(middle).ok().and_then(|middle| prefixes.get(middle));
        let digests = gather(group, &[mine.copied().unwrap_or(prefixes[entries.len()])])?;
        if digests.iter().all(|digest| *digest == digests[0]) {
            equal = middle;
        } else {
            different = middle;
        }
    }

    let mine = usize::try_from(equal).ok().and_then(|index| entries.get(index));
    let mut descriptions = vec![0_u8; group.world_size() * Entry::WIRE_BYTES];
    group.all_gather(&Entry::to_wire(mine), &mut descriptions)?;
    let entries: Vec<Option<Entry>> =
        descriptions.chunks_exact(Entry::WIRE_BYTES).map(Entry::from_wire).collect();
    Err(failure::models_differ(explain(&all, &entries)))
}

/// A property that must be equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    /// `parameter`, `buffer` or `option`.
    kind: String,
    name: String,
    /// Dtype and shape, or the option's value.
    value: String,
}

impl Entry {
    /// The length of a description as it travels. Longer ones are cut for display.
    const WIRE_BYTES: usize = 512;

    fn new(kind: &str, name: &str, value: String) -> Self {
        Self { kind: kind.to_owned(), name: name.to_owned(), value }
    }

    fn tensor(kind: &str, spec: &ParameterSpec) -> Self {
        Self::new(kind, &spec.name, spec.type_name())
    }

    /// The entry as bytes; zeros for `None`.
    fn to_wire(entry: Option<&Entry>) -> [u8; Entry::WIRE_BYTES] {
        let mut wire = [0; Entry::WIRE_BYTES];
        let Some(Entry { kind, name, value }) = entry else { return wire };
        // The name is cut, because users choose it and it may be long.
        let name = cut(name, 300);
        let text = format!("{kind}\n{name}\n{value}");
        let text = cut(&text, Entry::WIRE_BYTES);
        wire[..text.len()].copy_from_slice(text.as_bytes());
        wire
    }

    fn from_wire(wire: &[u8]) -> Option<Entry> {
        let end = wire.iter().position(|&byte| byte == 0).unwrap_or(wire.len());
        let text = String::from_utf8_lossy(&wire[..end]);
        let mut fields = text.splitn(3, '\n');
        let mut field = || fields.next().unwrap_or_default().to_owned();
        let entry = Entry { kind: field(), name: field(), value: field() };
        (end > 0).then_some(entry)
    }
}

/// The number of entries for the options.
const OPTION_ENTRIES: usize = 8;

fn entries(
    parameters: &[ParameterSpec],
    buffers: &[ParameterSpec],
    options: &DdpOptions,
    unknown: &[&str],
) -> Vec<Entry> {
    let DdpOptions { first_bucket_bytes, bucket_bytes, fits_buckets_to_model: fits, .. } = options;
    let fitted = if *fits { ", fitted to the model" } else { "" };
    let limits = format!("{first_bucket_bytes} and {bucket_bytes} bytes{fitted}");
    let unknown = match unknown {
        [] => String::new(),
        some => format!(", of which the model lacks {some:?}"),
    };
    let shards = match options.shards {
        Some(count) => format!("{count} with seed {}", options.seed),
        None => "none".to_owned(),
    };
    let option = |name: &str, value: String| Entry::new("option", name, value);
    let options: [Entry; OPTION_ENTRIES] = [
        option("bucket limits", limits),
        option("unused parameters", format!("{:?}", options.unused_parameters)),
        option("wire", format!("{:?}", options.wire)),
        option("divisor", format!("{:?}", options.divisor)),
        option("sharded optimizer", format!("{:?}", options.sharded)),
        option("check_every", options.check_every.to_string()),
        option("shards", shards),
        option("ignored names", format!("{:?}{unknown}", options.ignored)),
    ];
    let parameters = parameters.iter().map(|spec| Entry::tensor("parameter", spec));
    let buffers = buffers.iter().map(|spec| Entry::tensor("buffer", spec));
    // The options come last: if the model is wrong, too, the user should hear of that first.
    parameters.chain(buffers).chain(options).collect()
}

/// Digests of prefixes: digest `i` covers the first `i` entries. So equal digests mean equal beginnings.
fn prefix_digests(entries: &[Entry]) -> Vec<i64> {
    let mut digest = 0_u64;
    let mut digests = vec![0];
    for Entry { kind, name, value } in entries {
        let text = format!("{digest:016x}\n{kind}\n{name}\n{value}");
        digest = xxh3_64(text.as_bytes());
        digests.push(digest as i64);
    }
    digests
}

fn gather(group: &ProcessGroup, mine: &[i64]) -> Result<Vec<i64>> {
    let mut all = vec![0; mine.len() * group.world_size()];
    group.all_gather(mine, &mut all)?;
    Ok(all)
}

/// The text of the error. `counts[rank]` begins with the rank's numbers of parameters and buffers.
/// `entries[rank]` is its entry at the first place where the ranks differ.
fn explain(counts: &[&[i64]], entries: &[Option<Entry>]) -> String {
    const RANKS_SHOWN_MAX: usize = 8;
    let zero = &entries[0];
    let differing: Vec<usize> = (1..entries.len()).filter(|&rank| entries[rank] != *zero).collect();
    let mut text: Vec<String> = differing
        .iter()
        .take(RANKS_SHOWN_MAX)
        .map(|&rank| {
            let difference = difference(rank, &entries[rank], zero);
            match (counts[rank], counts[0]) {
                (mine, theirs) if mine[..2] == theirs[..2] => difference,
                (mine, theirs) => format!(
                    "rank {rank} has {} parameters and {} buffers, rank 0 has {} and {}; the first \
                     that differs: {difference}",
                    mine[0], mine[1], theirs[0], theirs[1]
                ),
            }
        })
        .collect();
    if let Some(more) = differing.len().checked_sub(RANKS_SHOWN_MAX).filter(|&more| more > 0) {
        text.push(format!("{more} more ranks differ"));
    }
    text.join("; ")
}

fn difference(rank: usize, entry: &Option<Entry>, zero: &Option<Entry>) -> String {
    let describe = |entry: &Option<Entry>| match entry {
        Some(Entry { kind, name, value }) => format!("{kind} `{name}` {value}"),
        None => "nothing".to_owned(),
    };
    match (entry, zero) {
        (Some(mine), Some(theirs)) if (&mine.kind, &mine.name) == (&theirs.kind, &theirs.name) => {
            let Entry { kind, name, value } = mine;
            format!("rank {rank}: {kind} `{name}` is {value}, rank 0 has {}", theirs.value)
        }
        _ => format!("rank {rank} has {} where rank 0 has {}", describe(entry), describe(zero)),
    }
}

/// The longest prefix of `text` with at most `bytes_max` bytes.
fn cut(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Divisor, UnusedParameters, Wire},
        *,
    };
    use drumline_group::DType;

    fn spec(name: &str, shape: &[usize]) -> ParameterSpec {
        ParameterSpec::new(name, shape, DType::F32)
    }

    /// Runs the check with one model per rank and returns every rank's answer.
    fn verify(models: Vec<(Vec<ParameterSpec>, Vec<ParameterSpec>, DdpOptions)>) -> Vec<String> {
        let groups = drumline_group::rendezvous::local_world(models.len()).unwrap();
        let ranks: Vec<_> = groups
            .into_iter()
            .zip(models)
            .map(|(group, (parameters, buffers, options))| {
                std::thread::spawn(move || {
                    match verify_model(&group, &parameters, &buffers, &options) {
                        Ok(()) => "equal".to_owned(),
                        Err(error) => {
                            let expected =
                                [crate::ErrorKind::ModelsDiffer, crate::ErrorKind::Argument];
                            assert!(expected.contains(&error.kind()), "{error}");
                            error.to_string()
                        }
                    }
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    fn model(
        parameters: Vec<ParameterSpec>,
    ) -> (Vec<ParameterSpec>, Vec<ParameterSpec>, DdpOptions) {
        (parameters, vec![spec("norm.mean", &[4])], DdpOptions::default())
    }

    #[test]
    fn equal_models_pass() {
        let parameters = vec![spec("fc1.weight", &[2, 3]), spec("fc1.bias", &[3])];
        assert_eq!(verify(vec![model(parameters); 3]), ["equal"; 3]);
    }

    #[test]
    fn every_rank_names_the_first_parameter_that_differs() {
        // At every place of a long model, so that bisection ends everywhere.
        let usual: Vec<_> = (0..9).map(|i| spec(&format!("fc{i}.weight"), &[10, 128])).collect();
        for place in 0..9 {
            let mut other = usual.clone();
            for later in &mut other[place..] {
                later.shape = vec![10, 64];
            }
            let answers = verify(vec![model(usual.clone()), model(other), model(usual.clone())]);
            let wanted = format!(
                "rank 1: parameter `fc{place}.weight` is f32[10, 64], rank 0 has f32[10, 128]"
            );
            for answer in answers {
                assert!(answer.contains(&wanted), "{answer}");
            }
        }
    }

    #[test]
    fn a_missing_parameter_is_named_with_the_counts() {
        let usual = vec![spec("a", &[1]), spec("b", &[2]), spec("c", &[3])];
        let answers =
            verify(vec![model(usual.clone()), model(usual.clone()), model(usual[..2].to_vec())]);
        for answer in answers {
            assert!(
                answer.contains("rank 2 has 2 parameters and 1 buffers, rank 0 has 3 and 1"),
                "{answer}"
            );
            assert!(
                answer.contains(
                    "rank 2 has buffer `norm.mean` f32[4] where rank 0 has parameter `c` f32[3]"
                ),
                "{answer}"
            );
        }
    }

    #[test]
    fn names_dtypes_buffers_and_options_count_too() {
        let usual = model(vec![spec("a", &[1])]);
        let renamed = model(vec![spec("z", &[1])]);
        let retyped = model(vec![ParameterSpec::new("a", [1], DType::F64)]);
        let mut buffer = usual.clone();
        buffer.1[0].shape = vec![5];
        let mut no_buffer = usual.clone();
        no_buffer.1.clear();
        let mut limits = usual.clone();
        limits.2 = limits.2.bucket_bytes(7);
        let with = |options: DdpOptions| (usual.0.clone(), usual.1.clone(), options);
        let unused = with(DdpOptions::default().unused_parameters(UnusedParameters::Ignore));
        let wire = with(DdpOptions::default().wire(Wire::Bf16));
        let divisor = with(DdpOptions::default().divisor(Divisor::ActiveRanks));
        let unknown = with(DdpOptions::default().ignore(["zzz"]));
        for (other, wanted) in [
            (renamed, "rank 1 has parameter `z` f32[1] where rank 0 has parameter `a` f32[1]"),
            (retyped, "rank 1: parameter `a` is f64[1], rank 0 has f32[1]"),
            (buffer, "rank 1: buffer `norm.mean` is f32[5], rank 0 has f32[4]"),
            (no_buffer, "rank 1 has option `bucket limits`"),
            (limits, "rank 1: option `bucket limits` is 1048576 and 7 bytes"),
            (unused, "rank 1: option `unused parameters` is Ignore, rank 0 has Error"),
            (wire, "rank 1: option `wire` is Bf16, rank 0 has AsIs"),
            (divisor, "rank 1: option `divisor` is ActiveRanks, rank 0 has InitialWorld"),
            (
                unknown,
                "rank 1: option `ignored names` is [\"zzz\"], of which the model lacks [\"zzz\"]",
            ),
        ] {
            for answer in verify(vec![usual.clone(), other]) {
                assert!(answer.contains(wanted), "{answer}");
            }
        }
    }

    #[test]
    fn ignored_tensors_may_differ_but_must_exist() {
        let options = DdpOptions::default().ignore(["own", "layer.bias"]);
        let of_rank = |rank: usize| {
            let own = spec("own.table", &[rank + 1]);
            (
                vec![own, spec("layer.weight", &[2]), spec("layer.bias", &[rank])],
                vec![],
                options.clone(),
            )
        };
        assert_eq!(verify((0..3).map(of_rank).collect()), ["equal"; 3]);

        let typo = DdpOptions::default().ignore(["layer.wei"]);
        for world_size in [1, 2] {
            let model = (vec![spec("layer.weight", &[2])], vec![], typo.clone());
            for answer in verify(vec![model; world_size]) {
                assert!(
                    answer.contains("the model has no tensor or module `layer.wei`"),
                    "{answer}"
                );
            }
        }
    }

    #[test]
    fn long_names_are_cut_not_refused() {
        let long = "ä".repeat(1000);
        let answers = verify(vec![model(vec![spec(&long, &[1])]), model(vec![spec(&long, &[2])])]);
        for answer in answers {
            assert!(answer.contains("` is f32[2], rank 0 has f32[1]"), "{answer}");
            assert!(answer.len() < 1000);
        }
    }
}
