use std::{collections::HashMap, sync::Arc};

use drumline_group::{DType, Element, GroupOptions, ProcessGroup};

use super::{
    background::Background, engine::AsyncReduce, layout::Layout, on_host::OnHost,
    options::AsyncReduceOptions,
};
use crate::{
    Error, Result,
    ddp::{DdpOptions, ParameterSpec, verify_model},
};

/// The tensors for which an [`AsyncReduce`] is made.
///
/// ```
/// use drumline::{ProcessGroup, async_reduce::{AsyncReduceOptions, TensorRegistry}};
///
/// let mut tensors = TensorRegistry::new();
/// tensors.register::<f32>("layer1.weight", 1024)?;
/// tensors.register::<f32>("layer1.bias", 32)?;
/// assert!(tensors.register::<f64>("layer1.bias", 32).is_err(), "each name once");
/// let reduce = tensors.freeze(&ProcessGroup::alone(), &AsyncReduceOptions::default())?;
/// # reduce.stop()?;
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct TensorRegistry {
    entries: Vec<ParameterSpec>,
    by_name: HashMap<String, usize>,
}

impl TensorRegistry {
    /// No tensors.
    pub fn new() -> TensorRegistry {
        TensorRegistry::default()
    }

    /// Adds a tensor of `len` elements. Register tensors that are ready at about the same time one after the
    /// other, because they share buckets.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when the name is taken, or when the tensor is larger than any memory.
    pub fn register<T: Element>(&mut self, name: impl Into<String>, len: usize) -> Result<()> {
        self.register_as(T::DTYPE, name, len)
    }

    /// [`register`](TensorRegistry::register) with a type that is known at run time.
    ///
    /// # Errors
    ///
    /// As for that.
    pub fn register_as(&mut self, dtype: DType, name: impl Into<String>, len: usize) -> Result<()> {
        let name = name.into();
        let invalid = |problem| Err(Error::argument("register", problem));
        if self.by_name.contains_key(&name) {
            return invalid(format!("tensor `{name}` is registered already"));
        }
        if len.checked_mul(dtype.size()).is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return invalid(format!("tensor `{name}` of {len} {dtype} is too long"));
        }
        self.by_name.insert(name.clone(), self.entries.len());
        self.entries.push(ParameterSpec::new(name, [len], dtype));
        Ok(())
    }

    /// Compares the tensors of all ranks, lays them out in one registered buffer, and makes the engine. All
    /// ranks of `group` must call this. The engine has a group of its own, so `group` may be used for other
    /// calls.
    ///
    /// The tensors lie in memory in the order in which rank 0 has registered them.
    ///
    /// # Errors
    ///
    /// [`ModelsDiffer`](crate::ErrorKind::ModelsDiffer), the same on every rank, names the first tensor or option that
    /// differs, and the ranks. [`Argument`](crate::ErrorKind::Argument) when nothing is registered, or when the
    /// operator cannot be applied to a type. [`Memory`](crate::ErrorKind::Memory) when there is too little memory to
    /// register. Otherwise as for [`ProcessGroup::new_group`].
    pub fn freeze(self, group: &ProcessGroup, options: &AsyncReduceOptions) -> Result<AsyncReduce> {
        let (own, layout) = self.lay_out(group, options)?;
        AsyncReduce::new(Arc::new(Background::new(own, layout, options.op, OnHost::default())))
    }

    /// The engine's own group, and the layout that is the same on all ranks.
    #[doc(hidden)]
    pub fn lay_out(
        self,
        group: &ProcessGroup,
        options: &AsyncReduceOptions,
    ) -> Result<(ProcessGroup, Layout)> {
        self.check(options)?;
        let ranks: Vec<usize> = (0..group.world_size()).collect();
        let own = group.new_group(&ranks, &GroupOptions::default().name("async_reduce"))?;
        let entries = self.in_common_order(&own, options)?;
        Ok((own, Layout::new(entries, options)?))
    }

    fn check(&self, options: &AsyncReduceOptions) -> Result<()> {
        let invalid = |problem| Err(Error::argument("freeze", problem));
        if self.entries.is_empty() {
            return invalid("no tensor is registered".to_owned());
        }
        let unfit = self.entries.iter().find(|entry| !options.op.supports(entry.dtype));
        match unfit {
            Some(spec) => {
                invalid(format!("tensor {spec} cannot be reduced by {}", options.op.name()))
            }
            None => Ok(()),
        }
    }

    /// The tensors in the order of rank 0. They are the same on all ranks.
    fn in_common_order(
        self,
        group: &ProcessGroup,
        options: &AsyncReduceOptions,
    ) -> Result<Vec<ParameterSpec>> {
        let TensorRegistry { mut entries, by_name } = self;
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        let limit = options.bucket_bytes;
        let limits = DdpOptions::default().first_bucket_bytes(limit).bucket_bytes(limit);
        verify_model(group, &entries, &[], &limits)?;

        // For each tensor, in the order of names: its index on rank 0.
        let mut turns: Vec<u64> = entries.iter().map(|spec| by_name[&spec.name] as u64).collect();
        group.broadcast(&mut turns, 0)?;
        let mut in_turn: Vec<(u64, ParameterSpec)> = turns.into_iter().zip(entries).collect();
        in_turn.sort_by_key(|(turn, _)| *turn);
        Ok(in_turn.into_iter().map(|(_, entry)| entry).collect())
    }
}
