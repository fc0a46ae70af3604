//! The same training on every kind of device that this build and this machine have.

use std::{
    io::{self, Write},
    panic::catch_unwind,
};

use burn::tensor::{Device, Tensor};
use drumline_burn::{
    DistributedDataParallel, TensorValues, distribute, named_tensors, parameters_digest,
};
use tempfile::TempDir;

use crate::{
    network::{Network, Notes},
    training::{Setup, error, learner, on_ranks},
};

type Open = fn() -> Device;

/// A device, if this build has its kind.
macro_rules! built {
    ($feature:tt, $device:expr) => {{
        #[cfg(feature = $feature)]
        let open: Option<Open> = Some(|| $device);
        #[cfg(not(feature = $feature))]
        let open: Option<Open> = None;
        ($feature, open)
    }};
}

#[allow(deprecated, reason = "burn will remove ndarray")]
fn others() -> [(&'static str, Option<Open>); 4] {
    [
        built!("ndarray", Device::ndarray()),
        built!("wgpu", Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
        built!("cuda", Device::cuda(0)),
        built!("rocm", Device::rocm(0)),
    ]
}

/// Whether the machine has such a device. If not, burn panics.
fn is_there(open: Open) -> bool {
    catch_unwind(|| Tensor::<1>::ones([1], &open()).into_data()).is_ok()
}

/// What two ranks learn: the losses of each step, and the parameters.
fn learned(device: &Device, wraps: bool) -> Vec<f32> {
    let setup = Setup { accumulation: Some(2), epochs: 2, ..Setup::new(0..64, 4) };
    let mut of_ranks = on_ranks(2, |group| {
        let (directory, notes) = (TempDir::new().unwrap(), Notes::default());
        let model = Network::new(1 + group.rank(), 8, notes.clone(), &device.clone().autodiff());
        let training = setup.training(directory.path());
        let result = if wraps {
            let (ddp, model) = DistributedDataParallel::wrap(model, &group).unwrap();
            distribute(training, &group).wrapped(&ddp).launch(learner(model))
        } else {
            distribute(training, &group).launch(learner(model))
        };
        assert!(result.error.is_none(), "{}", error(&result));
        let mut numbers = notes.losses();
        for tensor in named_tensors(&result.model).unwrap() {
            let TensorValues::F32(values) = tensor.values else {
                panic!("{} is not f32", tensor.name)
            };
            numbers.extend(values);
        }
        (parameters_digest(&result.model).unwrap(), numbers)
    });
    assert_eq!(of_ranks[0].0, of_ranks[1].0, "ranks differ on {device:?}");
    of_ranks.swap_remove(0).1
}

/// `make test` builds it with ndarray, `make vulkan` with wgpu.
#[test]
fn other_devices_learn_what_flex_learns() {
    let wanted = learned(&Device::flex(), false);
    assert!(wanted.len() > 16);
    let mut said = vec!["flex".to_owned()];
    for (name, open) in others() {
        let Some(open) = open else {
            said.push(format!("{name}: not built"));
            continue;
        };
        if !is_there(open) {
            said.push(format!("{name}: not on this machine"));
            continue;
        }
        for wraps in [false, true] {
            let found = learned(&open(), wraps);
            assert_eq!(found.len(), wanted.len());
            for (at, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
                assert!((found - wanted).abs() < 1e-5, "{name}, {at}: {found} and {wanted}");
            }
        }
        said.push(name.to_owned());
    }
    // Shown whatever happens to what the test prints.
    writeln!(io::stderr(), "a Learner was tried on {}", said.join(", ")).unwrap();
}
