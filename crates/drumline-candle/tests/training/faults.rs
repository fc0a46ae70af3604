//! What goes wrong on one rank is an error on every rank, which names the rank and the variable.

use candle_core::{DType, backprop::GradStore};
use candle_nn::VarMap;
use drumline::ProcessGroup;
use drumline_candle::{DataParallel, DdpOptions, Error, UnusedParameters};

use crate::{elements, gradients_of, named, numbers, on_ranks, variable};

/// The texts of the errors that wrapping gives on three ranks. `build` makes the variables of a rank.
fn errors_of_wrap(build: impl Fn(usize, &VarMap) + Sync) -> Vec<String> {
    on_ranks(3, |group| {
        let varmap = VarMap::new();
        build(group.rank(), &varmap);
        DataParallel::wrap(&varmap, &group).unwrap_err().to_string()
    })
}

fn assert_all(errors: &[String], parts: &[&str]) {
    for (rank, error) in errors.iter().enumerate() {
        assert_eq!(error, &errors[0], "rank {rank} has another text");
        for part in parts {
            assert!(error.contains(part), "rank {rank}: {error}");
        }
    }
}

#[test]
fn ranks_with_other_variables_are_named() {
    let errors = errors_of_wrap(|rank, varmap| {
        variable(varmap, "a.weight", &[2], DType::F32);
        variable(varmap, if rank == 1 { "c.weight" } else { "b.weight" }, &[2], DType::F32);
    });
    assert_all(&errors, &["rank 1 has parameter `c.weight` f32[2]", "`b.weight`"]);

    let errors = errors_of_wrap(|rank, varmap| {
        variable(varmap, "a.weight", &[2 + rank / 2], DType::F32);
    });
    assert_all(&errors, &["rank 2: parameter `a.weight` is f32[3], rank 0 has f32[2]"]);

    let errors = errors_of_wrap(|rank, varmap| {
        let dtype = if rank == 2 { DType::BF16 } else { DType::F32 };
        variable(varmap, "a.weight", &[2], dtype);
    });
    assert_all(&errors, &["rank 2: parameter `a.weight` is bf16[2], rank 0 has f32[2]"]);

    let errors = errors_of_wrap(|rank, varmap| {
        variable(varmap, "a.weight", &[2], DType::F32);
        if rank == 0 {
            variable(varmap, "b.weight", &[2], DType::F32);
        }
    });
    assert_all(&errors, &["rank 1 has 1 parameters", "rank 0 has 2", "`b.weight`"]);
}

#[test]
fn variables_that_cannot_be_averaged_are_named_before_anything_is_sent() {
    let errors = errors_of_wrap(|rank, varmap| {
        variable(varmap, "a.weight", &[2], DType::F32);
        if rank == 1 {
            variable(varmap, "b.weight", &[2], DType::F8E4M3);
        }
    });
    assert_all(&errors, &["rank 1: variable `b.weight` is f8e4m3", "f64, f32, f16 and bf16"]);

    let errors = errors_of_wrap(|rank, varmap| {
        if rank != 2 {
            variable(varmap, "a.weight", &[2], DType::F32);
        }
    });
    assert_all(&errors, &["rank 2: the VarMap has 0 variables", "build the model before `wrap`"]);

    let errors = errors_of_wrap(|_, varmap| {
        variable(varmap, "counts", &[2], DType::I64);
    });
    assert_all(
        &errors,
        &["ranks 0, 1, 2: the VarMap has 1 variables and none of a floating-point"],
    );
}

/// Makes a good step, then one in which `spoil` changes something on rank 1, then a good one again if that is
/// possible. Returns the texts of the errors of the second step.
fn errors_of_step(
    policy: UnusedParameters,
    first_is_good: bool,
    repair: impl Fn(&VarMap) + Sync,
    spoil: impl Fn(&VarMap, GradStore) -> GradStore + Sync,
) -> Vec<String> {
    on_ranks(3, |group| {
        let varmap = VarMap::new();
        let [a, b] = ["a", "b"].map(|name| variable(&varmap, name, &[2, 3], DType::F64));
        let statistic = variable(&varmap, "statistic", &[2], DType::F64);
        let options = DdpOptions::default().unused_parameters(policy);
        let mut ddp = DataParallel::wrap_with(&varmap, &group, &options).unwrap();
        let step = |ddp: &mut DataParallel| {
            let mut gradients = gradients_of(&[&a, &b], group.rank()).unwrap();
            ddp.average(&mut gradients).unwrap();
            assert_eq!(elements(gradients.get(&b).unwrap()), [2.0; 6]);
            assert!(gradients.get(&statistic).is_none());
        };
        if first_is_good {
            step(&mut ddp);
        }
        let mut gradients = gradients_of(&[&a, &b], group.rank()).unwrap();
        if group.rank() == 1 {
            gradients = spoil(&varmap, gradients);
        }
        let before = gradients.get(&a).map(elements);
        let error = ddp.average(&mut gradients).unwrap_err().to_string();
        assert_eq!(gradients.get(&a).map(elements), before, "own gradients stay");
        if group.rank() == 1 {
            repair(&varmap);
        }
        step(&mut ddp);
        error
    })
}

const POLICIES: [UnusedParameters; 2] = [UnusedParameters::Error, UnusedParameters::Ignore];

#[test]
fn a_variable_that_is_added_after_wrapping() {
    for policy in POLICIES {
        for first_is_good in [true, false] {
            let remove = |varmap: &VarMap| drop(varmap.data().lock().unwrap().remove("extra"));
            let errors = errors_of_step(policy, first_is_good, remove, |varmap, gradients| {
                variable(varmap, "extra", &[1], DType::F64);
                gradients
            });
            assert_all(&errors, &["rank 1: variable `extra` was added to the VarMap after `wrap`"]);
        }
    }
}

#[test]
fn a_variable_that_is_taken_away_after_wrapping() {
    let taken = std::sync::Mutex::new(None);
    let put_back = |varmap: &VarMap| {
        let var = taken.lock().unwrap().take().unwrap();
        varmap.data().lock().unwrap().insert("b".to_owned(), var);
    };
    let errors = errors_of_step(UnusedParameters::Error, true, put_back, |varmap, gradients| {
        *taken.lock().unwrap() = varmap.data().lock().unwrap().remove("b");
        gradients
    });
    assert_all(&errors, &["rank 1: variable `b` was taken out of the VarMap"]);
}

#[test]
fn gradients_of_another_model() {
    for policy in POLICIES {
        for first_is_good in [true, false] {
            let errors = errors_of_step(
                policy,
                first_is_good,
                |_| {},
                |_, _| {
                    let other = VarMap::new();
                    gradients_of(&[&variable(&other, "a", &[2, 3], DType::F64)], 0).unwrap()
                },
            );
            let wanted =
                "rank 1: the GradStore has no gradient of `a` or of any other of the 3 wrapped";
            assert_all(&errors, &[wanted]);
        }
    }
}

#[test]
fn a_gradient_that_is_missing_on_one_rank() {
    for first_is_good in [true, false] {
        let errors = errors_of_step(
            UnusedParameters::Error,
            first_is_good,
            |_| {},
            |varmap, mut all| {
                all.remove(&named(varmap, "b"));
                all
            },
        );
        assert_all(&errors, &["parameter `b` got no gradient on rank 1"]);
    }
}

#[test]
fn a_gradient_of_another_shape_or_type() {
    for policy in POLICIES {
        for gradient in [
            numbers(&[3, 2], 0, DType::F64), // as many elements
            numbers(&[5], 0, DType::F64),
            numbers(&[2, 3], 0, DType::F32),
        ] {
            for first_is_good in [true, false] {
                let errors = errors_of_step(
                    policy,
                    first_is_good,
                    |_| {},
                    |varmap, mut all| {
                        all.insert(&named(varmap, "b"), gradient.clone());
                        all
                    },
                );
                let wanted = "parameter `b` got a gradient of another dtype or length on rank 1";
                assert_all(&errors, &[wanted]);
            }
        }
    }
}

#[test]
fn a_buffer_that_has_a_gradient_later() {
    let errors = errors_of_step(
        UnusedParameters::Error,
        true,
        |_| {},
        |varmap, mut all| {
            all.insert(&named(varmap, "statistic"), numbers(&[2], 0, DType::F64));
            all
        },
    );
    assert_all(
        &errors,
        &["rank 1: variable `statistic` has a gradient", "UnusedParameters::Ignore"],
    );
}

#[test]
fn a_backward_that_fails() {
    for first_is_good in [true, false] {
        let errors = on_ranks(2, |group| {
            let varmap = VarMap::new();
            let weight = variable(&varmap, "weight", &[4], DType::F32);
            let mut ddp = DataParallel::wrap(&varmap, &group).unwrap();
            let good = || (&weight * 2.0).unwrap().sum_all().unwrap();
            if first_is_good {
                ddp.backward(&good()).unwrap();
            }
            // candle has no backward of this one.
            let bad = || {
                let kernel = weight.reshape((1, 1, 4)).unwrap();
                let input = numbers(&[1, 1, 4], 0, DType::F32);
                input.conv_transpose1d(&kernel, 0, 0, 1, 1, 1).unwrap().sum_all().unwrap()
            };
            let loss = if group.rank() == 1 { bad() } else { good() };
            let error = ddp.backward(&loss).unwrap_err().to_string();
            ddp.backward(&good()).unwrap();
            error
        });
        assert_all(&errors, &["rank 1: backward failed: "]);
    }
}

#[test]
fn a_rank_that_shadows_with_another_model() {
    let errors = on_ranks(2, |group| {
        let varmap = VarMap::new();
        let weight = variable(&varmap, "weight", &[4], DType::F32);
        let mut ddp = DataParallel::wrap(&varmap, &group).unwrap();
        let mut gradients = gradients_of(&[&weight], 0).unwrap();
        ddp.average(&mut gradients).unwrap();
        if group.rank() == 0 {
            return ddp.average(&mut gradients).unwrap_err().to_string();
        }
        variable(&varmap, "extra", &[4], DType::F32);
        ddp.shadow().unwrap_err().to_string()
    });
    assert_all(&errors, &["rank 1: variable `extra` was added"]);
}

#[test]
fn alone_the_same_mistakes_are_errors() {
    let varmap = VarMap::new();
    let [a, b] = ["a", "b"].map(|name| variable(&varmap, name, &[2], DType::F32));
    let mut ddp = DataParallel::wrap(&varmap, &ProcessGroup::alone()).unwrap();
    let mut error = |gradients: &mut GradStore| ddp.average(gradients).unwrap_err().to_string();
    let text = error(&mut GradStore::default());
    assert!(text.contains("rank 0: the GradStore has no gradient of `a`"), "{text}");
    ddp.average(&mut gradients_of(&[&a, &b], 0).unwrap()).unwrap();
    let mut error = |gradients: &mut GradStore| ddp.average(gradients).unwrap_err().to_string();
    let text = error(&mut gradients_of(&[&a], 0).unwrap());
    assert!(text.contains("step 2: parameter `b` got no gradient on rank 0"), "{text}");
    let mut gradients = gradients_of(&[&a, &b], 0).unwrap();
    gradients.insert(&b, numbers(&[3], 0, DType::F32));
    let text = error(&mut gradients);
    assert!(text.contains("`b` got a gradient of another dtype or length"), "{text}");
    variable(&varmap, "c", &[2], DType::F32);
    let text = error(&mut gradients_of(&[&a, &b], 0).unwrap());
    assert!(text.contains("variable `c` was added"), "{text}");
}

#[test]
fn ranks_that_make_other_calls_are_told_both() {
    let errors = on_ranks(2, |group| {
        let varmap = VarMap::new();
        let weight = variable(&varmap, "weight", &[2], DType::F32);
        let mut ddp = DataParallel::wrap(&varmap, &group).unwrap();
        let mut gradients = gradients_of(&[&weight], 0).unwrap();
        ddp.average(&mut gradients).unwrap();
        match group.rank() {
            0 => ddp.average(&mut gradients).map_err(|error| error.to_string()),
            // Rank 1 reduces something of its own.
            _ => group
                .all_reduce(&mut [1_i64], drumline::ReduceOp::Sum)
                .map_err(|error| error.to_string()),
        }
    });
    for error in errors {
        let error = error.unwrap_err();
        assert!(error.contains("all ranks must make the same calls"), "{error}");
    }
}

#[test]
fn a_rank_that_leaves_is_named() {
    let errors = on_ranks(2, |group| {
        let varmap = VarMap::new();
        let weight = variable(&varmap, "weight", &[2], DType::F32);
        let mut ddp = DataParallel::wrap(&varmap, &group).unwrap();
        let mut gradients = gradients_of(&[&weight], 0).unwrap();
        ddp.average(&mut gradients).unwrap();
        (group.rank() == 0).then(|| ddp.average(&mut gradients).unwrap_err())
    });
    let Some(error) = &errors[0] else { panic!("{errors:?}") };
    assert!(error.to_string().contains("rank 1"), "{error}");
}

#[test]
fn a_work_that_fails_fits_the_results_of_this_crate() {
    fn sum(group: &ProcessGroup) -> Result<Vec<f32>, Error> {
        Ok(group.all_reduce_async(vec![1.0], drumline::ReduceOp::Sum).unwrap().wait()?)
    }
    let group = drumline::rendezvous::local_world(1).unwrap().remove(0);
    assert_eq!(sum(&group).unwrap(), [1.0]);
    group.abort();
    let text = format!("{:?}", sum(&group).unwrap_err());
    assert!(text.contains("this rank has aborted the group"), "{text}");
    assert!(text.contains("(drumline explain "), "{text}");
}
