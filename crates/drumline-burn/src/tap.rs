//! Gradient taps: how the reducer gets a gradient while backward is still running.
//!
//! burn has no gradient hooks. It has reparameterizations: `Param::val()` runs a function of ours
//! on the stored parameter, in every forward. That function adds an identity to the graph. Its
//! backward step is our hook. Nothing is copied, and the user's model stays as it is.
//!
//! # Anchors
//!
//! Backward runs the recorded steps by depth, deepest first. A step is one deeper than its deepest parent. An
//! identity on a leaf has depth 1, so all taps would fire at the very end and nothing would overlap. But
//! parents that need no gradient count for the depth, too. So a tap gets a second parent, its *anchor*: an
//! untracked scalar of a chosen depth. The k-th use of a parameter in a forward takes an anchor that is
//! [`ANCHOR_GAP`] deeper than the one before. This keeps taps in the order of use, and near the layers to
//! which they belong. A wrong anchor would reduce overlap, but never affect correctness.
//!
//! # When is a gradient final?
//!
//! A parameter may be used several times; each use adds to its gradient. Every use is counted
//! while its step is in the graph, whether it is waiting for backward or will be thrown away. The
//! gradient is final when a tap fires and no use is left. A graph that is dropped late (a
//! forward without backward) thus only delays a gradient to the end of backward, where DDP submits
//! the missing gradients.

use std::{
    fmt,
    mem::{self, Discriminant},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use burn::{
    module::{Module, Param, Reparameterization, Reparameterizer},
    tensor::Tensor,
};
use drumline::ddp::GradientReducer;

use crate::{
    burn_version::{
        REPARAMETERIZATION,
        backend::{
            Autodiff, Backend, Backward, CheckpointStrategy, Checkpointer, Dispatch,
            DispatchDevice, Flex, FlexTensor, FloatTensor, GradientCheckpointingStrategy,
            Gradients, Ops, OpsKind, backend_extension, unary,
        },
    },
    pack::pack_flex,
};

#[cfg(feature = "gpu")]
use crate::{
    burn_version::gpu::{Cube, CubeBackend, CubeTensor, OnDevice},
    read_back::Reader,
};

/// Attaches a tap to each parameter that `slot_of` knows by its path. `owner` is what takes the model's steps.
pub(crate) fn attach<M: Module>(
    model: M,
    taps: &Arc<Taps>,
    owner: Wrapper,
    slot_of: impl Fn(&str) -> Option<usize>,
) -> M {
    match owner {
        Wrapper::Ddp => model.apply_reparameterization(Attach::<_, false> { taps, slot_of }),
        Wrapper::ShardedOptimizer => {
            model.apply_reparameterization(Attach::<_, true> { taps, slot_of })
        }
    }
}

/// What has wrapped a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wrapper {
    Ddp,
    ShardedOptimizer,
}

impl Wrapper {
    /// By the container and the name of a module in the place of a reparameterization; `None` if it is no tap.
    pub(crate) fn of_tap(container_type: &str, name: &str) -> Option<Self> {
        match name {
            _ if container_type != REPARAMETERIZATION => None,
            TapParameter::<false>::NAME => Some(Wrapper::Ddp),
            TapParameter::<true>::NAME => Some(Wrapper::ShardedOptimizer),
            _ => None,
        }
    }
}

/// State that all taps of a model share.
pub(crate) struct Taps {
    /// For each parameter, the number of uses in a graph that backward has not passed.
    open_uses: Vec<AtomicUsize>,
    anchors: Mutex<Anchors>,
    /// Where taps submit gradients. If nowhere, backward returns the gradients of this rank alone.
    target: Mutex<Option<Target>>,
    #[cfg(feature = "gpu")]
    reader: Reader,
}

/// Where taps submit gradients.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) reducer: Arc<GradientReducer>,
    /// The reducer's index of this model's first parameter.
    pub(crate) base: usize,
}

/// Taps that submit gradients, until this is dropped.
pub(crate) struct Armed<'a>(&'a Taps);

impl Drop for Armed<'_> {
    /// Runs even if backward panics. Then the reducer has the gradients that taps have submitted.
    fn drop(&mut self) {
        *self.0.target() = None;
        #[cfg(feature = "gpu")]
        self.0.reader.finish();
        // The next forward counts its uses from the start.
        self.0.anchors.lock().unwrap_or_else(PoisonError::into_inner).next = 0;
    }
}

impl Taps {
    pub(crate) fn new(parameters: usize) -> Self {
        let open_uses = (0..parameters).map(|_| AtomicUsize::new(0)).collect();
        Self {
            open_uses,
            anchors: Mutex::default(),
            target: Mutex::default(),
            #[cfg(feature = "gpu")]
            reader: Reader::new(),
        }
    }

    /// Makes the taps submit gradients to `target` during one backward, or to nobody.
    pub(crate) fn arm(&self, target: Option<Target>) -> Armed<'_> {
        *self.target() = target;
        Armed(self)
    }

    /// Passes a final gradient on. Does not wait.
    fn submit(&self, Target { reducer, base }: &Target, slot: usize, gradient: Stored) {
        let slot = base + slot;
        match gradient {
            Stored::Here(gradient) => {
                reducer.submit_to(slot, |place| pack_flex(&gradient, place));
            }
            #[cfg(feature = "gpu")]
            Stored::OnDevice(gradient) => self.reader.submit(reducer, slot, *gradient),
        }
    }

    fn target(&self) -> MutexGuard<'_, Option<Target>> {
        self.target.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_anchor<const D: usize>(&self, beside: &Tensor<D>) -> Tensor<1> {
        self.anchors.lock().unwrap_or_else(PoisonError::into_inner).next(beside)
    }
}

impl fmt::Debug for Taps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Taps({} parameters)", self.open_uses.len())
    }
}

/// The tap of one parameter; burn clones it with the model.
#[derive(Clone, Debug)]
pub(crate) struct Tap {
    taps: Arc<Taps>,
    slot: usize,
}

/// One use of a parameter in a forward: open until backward passes it or the graph is dropped.
#[derive(Debug)]
pub(crate) struct Use {
    tap: Tap,
    is_open: AtomicBool,
}

impl Use {
    fn open(tap: Tap) -> Arc<Self> {
        tap.taps.open_uses[tap.slot].fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { tap, is_open: AtomicBool::new(true) })
    }

    /// Returns whether this was the last open use of its parameter.
    fn close(&self) -> bool {
        self.is_open.swap(false, Ordering::Relaxed)
            && self.tap.taps.open_uses[self.tap.slot].fetch_sub(1, Ordering::AcqRel) == 1
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.close();
    }
}

/// The operations that burn's tensors dispatch to.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "gpu"))]
pub(crate) trait GradientTap: Backend {
    /// `x`, with a hook in backward.
    fn tap(x: FloatTensor<Self>, anchor: FloatTensor<Self>, tapped: Arc<Use>) -> FloatTensor<Self>;
    /// `x`, one step deeper in the graph.
    fn deepen(x: FloatTensor<Self>) -> FloatTensor<Self>;
    /// The memory of `x`, without a copy.
    fn stored(x: FloatTensor<Self>) -> Stored;
}

/// Where the elements of a tensor are. It is a type of its own, because the macro would take a tensor type for an
/// output.
pub(crate) enum Stored {
    /// In memory that can be read in place.
    Here(FlexTensor),
    /// On a GPU.
    #[cfg(feature = "gpu")]
    OnDevice(Box<CubeTensor>),
}

impl GradientTap for Flex {
    fn tap(x: FloatTensor<Self>, _: FloatTensor<Self>, _: Arc<Use>) -> FloatTensor<Self> {
        x
    }

    fn deepen(x: FloatTensor<Self>) -> FloatTensor<Self> {
        x
    }

    fn stored(x: FloatTensor<Self>) -> Stored {
        Stored::Here(x)
    }
}

#[cfg(feature = "gpu")]
impl GradientTap for Cube {
    fn tap(x: FloatTensor<Self>, _: FloatTensor<Self>, _: Arc<Use>) -> FloatTensor<Self> {
        x
    }

    fn deepen(x: FloatTensor<Self>) -> FloatTensor<Self> {
        x
    }

    fn stored(x: FloatTensor<Self>) -> Stored {
        Stored::OnDevice(Box::new(OnDevice::<CubeBackend>::resolve(x)))
    }
}

impl<B: GradientTap, C: CheckpointStrategy> GradientTap for Autodiff<B, C> {
    fn tap(x: FloatTensor<Self>, anchor: FloatTensor<Self>, tapped: Arc<Use>) -> FloatTensor<Self> {
        match TapBackward.prepare::<C>([x.node(), anchor.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(tapped, x.into_primitive()),
            OpsKind::UnTracked(prep) => prep.finish(x.into_primitive()),
        }
    }

    fn deepen(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let node = x.node();
        DeepenBackward.prepare::<C>([node]).compute_bound().stateless(x.into_primitive())
    }

    fn stored(x: FloatTensor<Self>) -> Stored {
        B::stored(x.into_primitive())
    }
}

#[derive(Debug)]
struct TapBackward;

impl<B: GradientTap> Backward<B, 2> for TapBackward {
    type State = Arc<Use>;

    /// Runs while burn holds the graph's lock: must not wait, panic or record operations.
    fn backward(self, ops: Ops<Arc<Use>, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [parameter, _anchor] = ops.parents;
        let gradient = grads.consume::<B>(&ops.node);
        let Some(parameter) = parameter else { return };
        grads.register::<B>(parameter.id, gradient); // adds to the gradients of other uses
        let Tap { taps, slot } = &ops.state.tap;
        let target = taps.target().clone();
        if let (true, Some(target)) = (ops.state.close(), target) {
            // The parameter is a leaf, whose gradient `consume` leaves in place.
            taps.submit(&target, *slot, B::stored(grads.consume::<B>(&parameter)));
        }
    }
}

#[derive(Debug)]
struct DeepenBackward;

impl<B: Backend> Backward<B, 1> for DeepenBackward {
    type State = ();

    fn backward(self, ops: Ops<(), 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        unary::<B, _>(ops.parents, ops.node, grads, |gradient| gradient);
    }
}

/// Larger than the number of steps between two uses of parameters: with 32, backward order and
/// firing order agree for common layers; with 1 most taps fire too late.
const ANCHOR_GAP: usize = 32;

/// The most anchors. Later uses share the deepest one. This bounds what forwards without backward can build
/// up.
const ANCHORS_MAX: usize = 4096;

/// Untracked scalars of rising depth, made once and kept.
#[derive(Default)]
struct Anchors {
    next: usize,
    /// All tensors of an operation must have the same backend and strategy.
    lines: Vec<(AnchorKind, Vec<Tensor<1>>)>,
}

type AnchorKind = (Discriminant<DispatchDevice>, Option<GradientCheckpointingStrategy>);

impl Anchors {
    fn next<const D: usize>(&mut self, beside: &Tensor<D>) -> Tensor<1> {
        let device = beside.device();
        let backend = mem::discriminant(device.clone().without_autodiff().as_dispatch());
        let kind = (backend, beside.gradient_checkpointing_strategy());
        let line = self.lines.iter().position(|(of, _)| *of == kind).unwrap_or_else(|| {
            self.lines.push((kind, Vec::new()));
            self.lines.len() - 1
        });
        let by_depth = &mut self.lines[line].1;
        let index = self.next.min(ANCHORS_MAX - 1);
        self.next += 1;
        let mut deepest = match by_depth.last() {
            Some(deepest) => deepest.clone(),
            None => Tensor::zeros([1], &device),
        };
        while by_depth.len() <= index {
            for _ in 0..ANCHOR_GAP {
                deepest = Tensor::from_dispatch(Dispatch::deepen(deepest.into_dispatch()));
            }
            by_depth.push(deepest.clone());
        }
        by_depth[index].clone()
    }
}

/// The reparameterization of a tapped parameter: the identity, with a tap. Its name tells whether a sharded optimizer
/// must take the steps.
#[derive(Module, Debug)]
pub(crate) struct TapParameter<const SHARDED: bool> {
    #[module(skip)]
    tap: Tap,
}

impl<const SHARDED: bool> Reparameterization for TapParameter<SHARDED> {
    const NAME: &'static str = if SHARDED { "sharded ddp" } else { "ddp" };

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        if !base.is_autodiff() {
            return base; // validation
        }
        let anchor = self.tap.taps.next_anchor(&base);
        let tapped = Use::open(self.tap.clone());
        Tensor::from_dispatch(Dispatch::tap(base.into_dispatch(), anchor.into_dispatch(), tapped))
    }
}

struct Attach<'a, F, const SHARDED: bool> {
    taps: &'a Arc<Taps>,
    slot_of: F,
}

impl<F: Fn(&str) -> Option<usize>, const SHARDED: bool> Reparameterizer for Attach<'_, F, SHARDED> {
    type Reparam = TapParameter<SHARDED>;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<TapParameter<SHARDED>>) {
        let tap = |slot| TapParameter { tap: Tap { taps: self.taps.clone(), slot } };
        (param, (self.slot_of)(path).map(tap))
    }
}
