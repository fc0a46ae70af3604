//! A model as a list of named tensors, to verify, broadcast, digest, save and load it.

use std::collections::HashSet;

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, Parameter},
    tensor::{self, Bool, Device, Int, Tensor, TensorData},
};
use drumline::{
    DType, bf16,
    ddp::{Broadcast, DdpOptions, ParameterSpec, StateDigest, verify_model},
    f16,
};

use crate::{Result, failure};

/// A tensor of a model, by the path of the field that holds it: `encoder.0.weight`.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedTensor {
    /// The path. Does not depend on whether the model is wrapped.
    pub name: String,
    /// Its lengths, outermost dimension first.
    pub shape: Vec<usize>,
    /// Its elements, row-major.
    pub values: TensorValues,
}

/// The elements of a tensor. Integers of all widths come as `i64`, booleans as 0 and 1.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum TensorValues {
    /// Single precision.
    F32(Vec<f32>),
    /// Double precision.
    F64(Vec<f64>),
    /// Half precision.
    F16(Vec<f16>),
    /// bfloat16.
    Bf16(Vec<bf16>),
    /// Integers.
    I64(Vec<i64>),
    /// Booleans.
    U8(Vec<u8>),
}

impl NamedTensor {
    /// A tensor from raw native-endian elements, as a file holds them.
    ///
    /// # Errors
    ///
    /// The number of bytes is not the one that shape and dtype need.
    pub fn from_bytes(
        name: impl Into<String>,
        shape: impl Into<Vec<usize>>,
        dtype: DType,
        bytes: &[u8],
    ) -> Result<Self> {
        let spec = ParameterSpec::new(name, shape, dtype);
        let elements = spec.shape.iter().try_fold(dtype.size(), |n, &length| n.checked_mul(length));
        if elements != Some(bytes.len()) {
            let problem = format!("{spec} has {} bytes", bytes.len());
            return Err(failure::tensors_do_not_fit(problem));
        }
        let mut values = TensorValues::zeros(dtype, spec.elements());
        values.as_bytes_mut().copy_from_slice(bytes);
        Ok(Self { name: spec.name, shape: spec.shape, values })
    }

    /// Name, shape and dtype without the elements.
    pub fn spec(&self) -> ParameterSpec {
        ParameterSpec::new(self.name.clone(), self.shape.clone(), self.values.dtype())
    }
}

impl TensorValues {
    /// The dtype in which the values travel.
    pub fn dtype(&self) -> DType {
        match self {
            TensorValues::F32(_) => DType::F32,
            TensorValues::F64(_) => DType::F64,
            TensorValues::F16(_) => DType::F16,
            TensorValues::Bf16(_) => DType::Bf16,
            TensorValues::I64(_) => DType::I64,
            TensorValues::U8(_) => DType::U8,
        }
    }

    /// The elements as native-endian bytes.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            TensorValues::F32(values) => bytemuck::cast_slice(values),
            TensorValues::F64(values) => bytemuck::cast_slice(values),
            TensorValues::F16(values) => bytemuck::cast_slice(values),
            TensorValues::Bf16(values) => bytemuck::cast_slice(values),
            TensorValues::I64(values) => bytemuck::cast_slice(values),
            TensorValues::U8(values) => values,
        }
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        match self {
            TensorValues::F32(values) => bytemuck::cast_slice_mut(values),
            TensorValues::F64(values) => bytemuck::cast_slice_mut(values),
            TensorValues::F16(values) => bytemuck::cast_slice_mut(values),
            TensorValues::Bf16(values) => bytemuck::cast_slice_mut(values),
            TensorValues::I64(values) => bytemuck::cast_slice_mut(values),
            TensorValues::U8(values) => values,
        }
    }

    fn zeros(dtype: DType, elements: usize) -> Self {
        match dtype {
            DType::F64 => TensorValues::F64(vec![0.0; elements]),
            DType::F16 => TensorValues::F16(vec![f16::ZERO; elements]),
            DType::Bf16 => TensorValues::Bf16(vec![bf16::ZERO; elements]),
            DType::I64 => TensorValues::I64(vec![0; elements]),
            DType::U8 => TensorValues::U8(vec![0; elements]),
            _ => TensorValues::F32(vec![0.0; elements]),
        }
    }

    /// `data` must have the dtype of `spec`, or an integer or boolean dtype that converts to it.
    fn read(spec: &ParameterSpec, data: TensorData) -> Result<Self> {
        let values = match spec.dtype {
            DType::F32 => data.try_into_vec().map(TensorValues::F32),
            DType::F64 => data.try_into_vec().map(TensorValues::F64),
            DType::F16 => data.try_into_vec().map(TensorValues::F16),
            DType::Bf16 => data.try_into_vec().map(TensorValues::Bf16),
            DType::I64 => data.try_into_vec_as().map(TensorValues::I64),
            _ => data.try_into_vec_as().map(TensorValues::U8),
        };
        values.map_err(|error| failure::tensors_do_not_fit(format!("{spec}: {error:?}")))
    }

    pub(crate) fn into_data(self, shape: tensor::Shape) -> TensorData {
        match self {
            TensorValues::F32(values) => TensorData::new(values, shape),
            TensorValues::F64(values) => TensorData::new(values, shape),
            TensorValues::F16(values) => TensorData::new(values, shape),
            TensorValues::Bf16(values) => TensorData::new(values, shape),
            TensorValues::I64(values) => TensorData::new(values, shape),
            TensorValues::U8(values) => {
                TensorData::new(values.into_iter().map(|value| value != 0).collect(), shape)
            }
        }
    }
}

/// All tensors of a model, parameters and buffers, in the order of its fields.
///
/// # Errors
///
/// A tensor has a dtype that [`TensorValues`] does not support, or the path of another tensor.
///
/// ```
/// use burn::{nn::LinearConfig, tensor::Device};
///
/// let model = LinearConfig::new(3, 2).init(&Device::flex());
/// let tensors = drumline_burn::named_tensors(&model)?;
/// assert_eq!((tensors[0].name.as_str(), &tensors[0].shape[..]), ("weight", &[3, 2][..]));
/// assert_eq!((tensors[1].name.as_str(), &tensors[1].shape[..]), ("bias", &[2][..]));
///
/// let model = drumline_burn::load_named_tensors(model, tensors)?;
/// # let _ = model;
/// # Ok::<(), drumline_burn::Error>(())
/// ```
pub fn named_tensors<M: Module>(model: &M) -> Result<Vec<NamedTensor>> {
    let mut tensors = Vec::new();
    let mut names = HashSet::new();
    visit(model, |tensor| {
        let values = tensor.values()?;
        let ParameterSpec { name, shape, .. } = tensor.spec;
        if !names.insert(name.clone()) {
            return Err(failure::shared_path(name));
        }
        tensors.push(NamedTensor { name, shape, values });
        Ok(())
    })?;
    Ok(tensors)
}

/// Puts `tensors` into a model: the reverse of [`named_tensors`]. Their order does not matter.
///
/// ```
/// use burn::{nn::LinearConfig, tensor::Device};
/// use drumline_burn::{load_named_tensors, named_tensors, parameters_digest};
///
/// let model = LinearConfig::new(3, 2).init(&Device::flex());
/// let saved = named_tensors(&model)?;
/// let other = LinearConfig::new(3, 2).init(&Device::flex()); // random
/// let loaded = load_named_tensors(other.clone(), saved.clone())?;
/// assert_eq!(parameters_digest(&loaded)?, parameters_digest(&model)?);
///
/// let error = load_named_tensors(other, saved[..1].to_vec()).unwrap_err().to_string();
/// assert!(error.contains("`bias` f32[2] is missing"), "{error}");
/// # Ok::<_, drumline_burn::Error>(())
/// ```
///
/// # Errors
///
/// `tensors` are not exactly the model's tensors, with the same shapes and dtypes. Then nothing was loaded.
pub fn load_named_tensors<M: Module>(model: M, mut tensors: Vec<NamedTensor>) -> Result<M> {
    let mut problems = Vec::new();
    let mut found = 0;
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let same = tensors.windows(2).filter(|pair| pair[0].name == pair[1].name);
    problems.extend(same.map(|pair| format!("`{}` comes twice", pair[0].name)));
    let mut names = HashSet::new();
    visit(&model, |tensor| {
        let spec = &tensor.spec;
        if !names.insert(spec.name.clone()) {
            return Err(failure::shared_path(spec.name.clone()));
        }
        match tensors.binary_search_by(|t| t.name.cmp(&spec.name)).map(|at| tensors[at].spec()) {
            Err(_) => problems.push(format!("{spec} is missing")),
            Ok(given) if given == *spec => found += 1,
            Ok(given) => problems.push(format!("{spec} cannot be {}", given.type_name())),
        }
        Ok(())
    })?;
    if problems.is_empty() && found < tensors.len() {
        visit(&model, |tensor| {
            tensors.retain(|given| given.name != tensor.spec.name);
            Ok(())
        })?;
        problems.extend(tensors.iter().map(|left| format!("the model has no {}", left.spec())));
    }
    if !problems.is_empty() {
        return Err(failure::tensors_do_not_fit(shorten(problems)));
    }
    map(model, |tensor| {
        let at = tensors.binary_search_by(|given| given.name.cmp(&tensor.spec.name));
        Ok(at.ok().map(|at| tensors.remove(at).values))
    })
}

/// A digest of parameters and buffers. It is equal on all ranks as long as they have the same values.
///
/// Buffers drift apart between ranks in training; call
/// [`sync_buffers`](crate::DistributedDataParallel::sync_buffers) first.
pub fn parameters_digest<M: Module>(model: &M) -> Result<u64> {
    digest_except(model, &no_tensor)
}

/// [`parameters_digest`] without the tensors that `skip` names.
pub(crate) fn digest_except<M: Module>(model: &M, skip: &dyn Fn(&str) -> bool) -> Result<u64> {
    let mut digest = StateDigest::default();
    visit_except(model, skip, |tensor| {
        digest.tensor(&tensor.spec, tensor.values()?.as_bytes());
        Ok(())
    })?;
    Ok(digest.finish())
}

/// Whether a tensor of `model` is not trained.
#[cfg(feature = "train")]
pub(crate) fn has_buffers<M: Module>(model: &M) -> Result<bool> {
    let mut has_buffers = false;
    visit(model, |tensor| {
        has_buffers |= !tensor.is_trained;
        Ok(())
    })?;
    Ok(has_buffers)
}

/// A choice of tensors of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    All,
    /// The tensors that no optimizer changes: running statistics, frozen parameters, integers.
    Buffers,
}

/// Copies the values of rank `source` to all ranks, but for the tensors that `skip` names.
pub(crate) fn broadcast<M: Module>(
    model: M,
    which: Which,
    skip: &dyn Fn(&str) -> bool,
    source: usize,
    group: &drumline::ProcessGroup,
) -> Result<M> {
    let chosen = |tensor: &Seen<'_>| which == Which::All || !tensor.is_trained;
    let (mut trained, mut others) = (Vec::new(), Vec::new());
    visit_except(&model, skip, |tensor| {
        if chosen(&tensor) {
            if tensor.is_trained { &mut trained } else { &mut others }.push(tensor.spec);
        }
        Ok(())
    })?;
    // A rank may have frozen a layer, or pass another model: its bytes would go to the wrong tensors.
    verify_model(group, &trained, &others, &DdpOptions::default())?;
    let bytes = trained.iter().chain(&others).map(ParameterSpec::bytes).sum();
    let mut broadcast = Broadcast::from_rank(source, group, bytes);
    let model = if broadcast.is_source() {
        visit_except(&model, skip, |tensor| {
            if chosen(&tensor) {
                broadcast.put(tensor.values()?.as_bytes())?;
            }
            Ok(())
        })?;
        model
    } else {
        map_except(model, skip, |tensor| {
            if !chosen(&tensor) {
                return Ok(None);
            }
            let mut values = TensorValues::zeros(tensor.spec.dtype, tensor.spec.elements());
            broadcast.take(values.as_bytes_mut())?;
            Ok(Some(values))
        })?
    };
    broadcast.finish()?;
    Ok(model)
}

/// A tensor of a model that is being visited.
pub(crate) struct Seen<'a> {
    pub(crate) spec: ParameterSpec,
    /// Whether it requires a gradient.
    pub(crate) is_trained: bool,
    pub(crate) device: Device,
    read: &'a dyn Fn() -> TensorData,
}

impl Seen<'_> {
    fn values(&self) -> Result<TensorValues> {
        TensorValues::read(&self.spec, (self.read)())
    }
}

/// Calls `each` with all tensors of `model`, until one call fails.
pub(crate) fn visit<M: Module>(model: &M, each: impl FnMut(Seen<'_>) -> Result<()>) -> Result<()> {
    visit_except(model, &no_tensor, each)
}

/// [`visit`] without the tensors that `skip` names.
pub(crate) fn visit_except<M: Module>(
    model: &M,
    skip: &dyn Fn(&str) -> bool,
    each: impl FnMut(Seen<'_>) -> Result<()>,
) -> Result<()> {
    flush_running_state(model);
    let mut visitor = Visit { path: Path::default(), skip, each, result: Ok(()) };
    model.visit(&mut visitor);
    visitor.result
}

/// Whether `model` would learn: a parameter of it requires a gradient.
pub(crate) fn is_training<M: Module>(model: &M) -> bool {
    struct Find(bool);
    impl VisitFloat for Find {
        fn float<const D: usize>(&mut self, _: &str, param: &Param<Tensor<D>>) {
            self.0 |= param.is_require_grad();
        }
    }
    let mut find = Find(false);
    visit_floats(model, &mut find);
    find.0
}

/// The visitor of [`visit_floats`].
pub(crate) trait VisitFloat {
    fn float<const D: usize>(&mut self, name: &str, param: &Param<Tensor<D>>);
}

/// Calls `visitor` with all floating-point tensors of `model` and their paths.
pub(crate) fn visit_floats<M: Module>(model: &M, visitor: &mut impl VisitFloat) {
    model.visit(&mut VisitFloats { path: Path::default(), visitor });
}

/// Replaces the tensors for which `each` gives values, until one call fails.
fn map<M: Module>(
    model: M,
    each: impl FnMut(Seen<'_>) -> Result<Option<TensorValues>>,
) -> Result<M> {
    map_except(model, &no_tensor, each)
}

/// [`map`] without the tensors that `skip` names.
fn map_except<M: Module>(
    model: M,
    skip: &dyn Fn(&str) -> bool,
    each: impl FnMut(Seen<'_>) -> Result<Option<TensorValues>>,
) -> Result<M> {
    flush_running_state(&model);
    let mut mapper = Map { path: Path::default(), skip, each, result: Ok(()) };
    let model = model.map(&mut mapper);
    mapper.result.map(|()| model)
}

/// Names no tensor.
fn no_tensor(_: &str) -> bool {
    false
}

/// A running statistic keeps the newest update of each thread aside. At the next update, or at `valid()`, it
/// overwrites its value with them. So these updates must be taken in before values are read, and above all
/// before they are replaced.
pub(crate) fn flush_running_state<M: Module>(model: &M) {
    drop(model.valid());
}

/// The path of field names to the current position of a traversal.
#[derive(Default)]
pub(crate) struct Path(Vec<String>);

impl Path {
    pub(crate) fn enter(&mut self, name: &str) {
        self.0.push(name.to_owned());
    }

    pub(crate) fn exit(&mut self) {
        self.0.pop();
    }

    pub(crate) fn name(&self) -> String {
        self.0.join(".")
    }

    fn spec<const D: usize, K: tensor::kind::Basic>(
        &self,
        tensor: &Tensor<D, K>,
    ) -> Result<ParameterSpec> {
        let dtype = match tensor.dtype() {
            tensor::DType::F32 => DType::F32,
            tensor::DType::F64 => DType::F64,
            tensor::DType::F16 => DType::F16,
            tensor::DType::BF16 => DType::Bf16,
            dtype if dtype.is_int() || dtype.is_uint() => DType::I64,
            tensor::DType::Bool(_) => DType::U8,
            other => {
                let dtype = format!("{other:?}");
                return Err(failure::unsupported_dtype(self.name(), dtype));
            }
        };
        Ok(ParameterSpec::new(self.name(), tensor.shape().to_vec(), dtype))
    }
}

struct Visit<'a, F> {
    path: Path,
    skip: &'a dyn Fn(&str) -> bool,
    each: F,
    result: Result<()>,
}

impl<F: FnMut(Seen<'_>) -> Result<()>> Visit<'_, F> {
    fn tensor<const D: usize, K: tensor::kind::Basic>(&mut self, param: &Param<Tensor<D, K>>)
    where
        Tensor<D, K>: Parameter,
    {
        if self.result.is_ok() && !(self.skip)(&self.path.name()) {
            let tensor = param.base();
            self.result = self.path.spec(&tensor).and_then(|spec| {
                (self.each)(Seen {
                    spec,
                    is_trained: param.is_require_grad(),
                    device: tensor.device(),
                    read: &|| tensor.to_data(),
                })
            });
        }
    }
}

impl<F: FnMut(Seen<'_>) -> Result<()>> ModuleVisitor for Visit<'_, F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.tensor(param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.tensor(param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.tensor(param);
    }

    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }
}

struct VisitFloats<'a, V> {
    path: Path,
    visitor: &'a mut V,
}

impl<V: VisitFloat> ModuleVisitor for VisitFloats<'_, V> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.visitor.float(&self.path.name(), param);
    }

    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }
}

struct Map<'a, F> {
    path: Path,
    skip: &'a dyn Fn(&str) -> bool,
    each: F,
    result: Result<()>,
}

impl<F: FnMut(Seen<'_>) -> Result<Option<TensorValues>>> Map<'_, F> {
    fn tensor<const D: usize, K: tensor::kind::Basic>(
        &mut self,
        param: Param<Tensor<D, K>>,
    ) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Parameter,
    {
        if self.result.is_err() || (self.skip)(&self.path.name()) {
            return param;
        }
        let tensor = param.base();
        let values = self.path.spec(&tensor).and_then(|spec| {
            (self.each)(Seen {
                spec,
                is_trained: param.is_require_grad(),
                device: tensor.device(),
                read: &|| tensor.to_data(),
            })
        });
        match values {
            Ok(None) => param,
            Ok(Some(values)) => {
                let require_grad = param.is_require_grad();
                let options = (&tensor.device(), tensor.dtype());
                let data = values.into_data(tensor.shape());
                param.map(|_| {
                    Parameter::set_require_grad(Tensor::from_data(data, options), require_grad)
                })
            }
            Err(error) => {
                self.result = Err(error);
                param
            }
        }
    }
}

impl<F: FnMut(Seen<'_>) -> Result<Option<TensorValues>>> ModuleMapper for Map<'_, F> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.tensor(param)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.tensor(param)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.tensor(param)
    }

    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }
}

/// The first problems, joined.
fn shorten(mut problems: Vec<String>) -> String {
    const SHOWN_MAX: usize = 8;
    if let Some(more) = problems.len().checked_sub(SHOWN_MAX).filter(|&more| more > 0) {
        problems.truncate(SHOWN_MAX);
        problems.push(format!("and {more} more"));
    }
    problems.join("; ")
}
