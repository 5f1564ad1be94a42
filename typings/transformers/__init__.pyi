# The classes that swarm uses, each from the module that defines it. Without this file pyright reads a thousand modules of
# models, which the package lists, and takes a third longer.
from transformers.cache_utils import DynamicCache as DynamicCache
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.llama.configuration_llama import LlamaConfig as LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM as LlamaForCausalLM
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config as Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM as Qwen2ForCausalLM
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
from transformers.utils.quantization_config import BitsAndBytesConfig as BitsAndBytesConfig
